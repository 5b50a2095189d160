"""Sharded tensors without a model: given values, dealt out over replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenly.sharded import ShardedTensor, Shards
from evenly.team import values
from evenly.team.team import Team
from evenly.team.teams import team_for


def team_of(replicas: int) -> Team:
    """A running team of CPU replicas."""
    team = team_for([torch.device("cpu")] * replicas)
    with team.lock:
        team.ensure_ready()
    return team


def uneven(total: int, replicas: int) -> tuple[int, ...]:
    """Rows for each replica, as uneven as a batch is split, the larger shards first."""
    return tuple(total // replicas + (replica < total % replicas) for replica in range(replicas))


def shard(
    team: Team,
    tensor: Tensor,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    *,
    requires_grad: bool | None = None,
) -> ShardedTensor:
    """A leaf with the values of ``tensor``, dealt out along ``dim``."""
    rows = uneven(tensor.shape[dim], team.size) if rows is None else tuple(rows)
    local, *others = tensor.detach().clone().split(rows, dim)
    with team.lock:
        handle = values.put(team, others)
    content = Shards(team, local.clone(), handle, dim, tuple(rows))
    sharded = ShardedTensor(content, tensor.shape, tensor.detach().clone().stride())
    return sharded.requires_grad_(tensor.requires_grad if requires_grad is None else requires_grad)
