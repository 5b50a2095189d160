"""Plain operands on their way to the replicas: whole or cut into rows, remembered while they stay as they are.

A loss and its gradient use the same targets, every step the same weights. Whether a tensor still is what was sent
is found out by looking at it, not at its version: writes through ``.data``, a fused optimizer or a NumPy array leave
no trace there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evenly.team import values
from evenly.team.values import Handle, Number

if TYPE_CHECKING:
    from evenly.team.team import Team

REMEMBERED_BYTES = 16 << 20
"""Larger tensors are sent every time: a copy is kept of what is remembered, and looking costs as much as sending."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Sent:
    """What was sent of one tensor, and is forgotten in the replicas when this is.

    It must not keep the team: a target that lives as long as the program would keep the replicas running.

    Attributes:
        owner: The tensor.
        copies: What each replica was sent.
    """

    __slots__ = ("copies", "generation", "number", "owner", "team")

    def __init__(self, owner: weakref.ref[Tensor], copies: list[Tensor], handle: Handle) -> None:
        self.owner = owner
        self.copies = copies
        self.team = weakref.ref(handle.team)
        self.number, self.generation = handle.number, handle.generation
        handle.generation = -1  # from now on this is what releases it

    def __del__(self) -> None:
        team = self.team()
        if team is not None:
            team.release(self.generation, value=self.number)


class _Lent(Handle):
    """A handle of what is remembered, for one use."""

    __slots__ = ("sent",)

    def __init__(self, team: Team, sent: _Sent) -> None:
        super().__init__(team, sent.number)
        self.sent = sent

    def __del__(self) -> None:
        """What is remembered stays."""


_sent: dict[tuple[Any, ...], _Sent] = {}


def cut(tensor: Tensor, dim: int, rows: tuple[int, ...], team: Team) -> tuple[Tensor, Handle]:
    """Rows of a plain tensor: the driver's, and those of the replicas there."""
    own, *others = torch.split(tensor.detach(), list(rows), dim)
    return own, _there(tensor, others, (id(tensor), id(team), dim, rows), team)


def whole(tensor: Tensor, replicas: int, team: Team) -> tuple[Tensor, Handle | Number]:
    """A plain tensor, here and in every replica."""
    value = tensor.detach()
    if value.dim() == 0:  # the gradient of a loss
        return value, values.number(value)
    return value, _there(tensor, [value] * (replicas - 1), (id(tensor), id(team), replicas), team)


def _there(tensor: Tensor, pieces: Sequence[Tensor], key: tuple[Any, ...], team: Team) -> Handle:
    known = _sent.get(key)
    current = known is not None and known.owner() is tensor and known.generation == team.generation
    if known is not None and current and all(map(_same, pieces, known.copies)):
        return _Lent(team, known)
    handle = values.put(team, pieces)
    if tensor.numel() * tensor.element_size() <= REMEMBERED_BYTES:
        distinct = {id(piece): piece.clone() for piece in pieces}
        # The entry goes with the tensor object itself.
        owner = weakref.ref(tensor, lambda _: _sent.pop(key, None))
        sent = _sent[key] = _Sent(owner, [distinct[id(piece)] for piece in pieces], handle)
        return _Lent(team, sent)
    return handle


def _same(tensor: Tensor, copy: Tensor) -> bool:
    """Whether two tensors are the same bit for bit."""
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return False
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        integers = _INTEGERS[tensor.element_size()]
        tensor, copy = tensor.view(integers), copy.view(integers)
    elif tensor.is_complex():
        if tensor.is_conj() or tensor.is_neg() or copy.is_conj() or copy.is_neg():
            return False
        return _same(torch.view_as_real(tensor), torch.view_as_real(copy))
    if tensor.is_neg():
        return False
    return torch.equal(tensor, copy)
