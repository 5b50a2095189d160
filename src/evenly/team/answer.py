"""A replica's output on its way to the driver: its structure by value, its tensors by position.

Tensors stay in the replica; in the structure a :class:`RemoteTensor` stands for each. The structure is sent only when
it differs from the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenly.containers import StandIn
from evenly.packed import Layout, layout_of
from evenly.structure import flatten
from evenly.team.protocol import DTYPES, can_travel


@dataclass(frozen=True)
class RemoteTensor(StandIn):
    """A tensor of a replica's output.

    Attributes:
        position: Which one, counted through the output in order.
        shape, dtype, requires_grad: As in the replica.
    """

    position: int
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    requires_grad: bool = False


@dataclass(frozen=True)
class RemotePacked(StandIn):
    """A packed sequence of a replica's output."""

    data: RemoteTensor
    layout: Layout


@dataclass(frozen=True)
class Answer:
    """What a replica's forward returned, as the driver sees it."""

    output: Any
    tensors: Sequence[RemoteTensor]


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output that can stay where they are, in order. Both sides count them alike."""
    if type(output) is Tensor:
        return [output] if can_travel(output) else []
    leaves, _ = flatten(output, root="output", objects=True)
    found: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, PackedSequence):
            found.append(leaf.data)
        elif isinstance(leaf, Tensor) and can_travel(leaf):
            found.append(leaf)
    return found


def outline(output: Any) -> tuple[Any, list[Tensor]]:
    """In the replica: the output with its tensors replaced, and the tensors."""
    if type(output) is Tensor and can_travel(output):
        return RemoteTensor(0), [output]
    leaves, tree = flatten(output, root="output", objects=True)
    tensors: list[Tensor] = []
    made: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, PackedSequence):
            made.append(RemotePacked(RemoteTensor(len(tensors)), layout_of(leaf)))
            tensors.append(leaf.data)
        elif isinstance(leaf, Tensor) and can_travel(leaf):
            made.append(RemoteTensor(len(tensors)))
            tensors.append(leaf)
        else:
            made.append(leaf)
    return tree.rebuild(made), tensors


def apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In the replica: outputs without their history, and in memory of their own.

    Whether outputs share memory is for the driver's to say: with a single row `flatten()` and its like copy less.
    """
    if len(tensors) == 1:
        return [tensors[0].detach()]
    found: list[Tensor] = []
    seen: set[int] = set()
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        found.append(tensor.detach().clone() if place and place in seen else tensor.detach())
        seen.add(place)
    return found


def read(outlined: Any, metas: Sequence[tuple[int, tuple[int, ...], bool]]) -> Answer:
    """In the driver: the output with what is known of its tensors."""
    tensors = [
        RemoteTensor(position, tuple(shape), DTYPES[dtype], requires_grad)
        for position, (dtype, shape, requires_grad) in enumerate(metas)
    ]
    if type(outlined) is RemoteTensor:
        return Answer(tensors[outlined.position], tensors)
    leaves, tree = flatten(outlined, root="output", objects=True)
    made: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, RemoteTensor):
            made.append(tensors[leaf.position])
        elif isinstance(leaf, RemotePacked):
            made.append(replace(leaf, data=tensors[leaf.data.position]))
        else:
            made.append(leaf)
    return Answer(tree.rebuild(made), tensors)
