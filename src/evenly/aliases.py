"""Outputs that share memory: with the arguments that they are or are views of, and with one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from evenly.outputs import Rows
from evenly.sharded import ShardedTensor

if TYPE_CHECKING:
    from evenly.parts import TensorLeaf

Given = Sequence[tuple["Tensor | None", "TensorLeaf"]]
"""The driver's own arguments, each with the tensor of the user's that it is, or has rows of."""


class Aliases:
    """What the outputs of one call share memory with.

    Args:
        given: The driver's arguments.
        rows: Rows of the batch.
    """

    def __init__(self, given: Given, rows: int) -> None:
        self._given = [(own, leaf) for own, leaf in given if own is not None]
        self._rows = rows
        self._known: dict[int, tuple[str, Tensor | None]] = {}

    def of_user(self, local: Tensor, rule: Rows) -> Tensor | None:
        """The user's own tensor when an argument is returned as it is, or the same view of it as of the rows."""
        for own, leaf in self._given:
            value = leaf.value
            if own is local and leaf.dim == rule.dim and rule.factor == 1:
                return value
            if leaf.dim is None or isinstance(value, ShardedTensor) or not _is_view(local, own):
                continue
            # A single row does not tell how far it is to the next one.
            step = value.stride(leaf.dim) if local.shape[rule.dim] == 1 == rule.factor else local.stride(rule.dim)
            if step * rule.factor == value.stride(leaf.dim):
                shape, stride = list(local.shape), list(local.stride())
                shape[rule.dim], stride[rule.dim] = self._rows * rule.factor, step
                with torch.set_grad_enabled(local.requires_grad):  # the bridge runs without
                    base = value if local.requires_grad else value.detach()
                    return base.as_strided(shape, stride, local.storage_offset())
        return None

    def is_of_user(self, local: Tensor) -> bool:
        """Whether the driver's part of an output lies in a plain tensor of the user's, which the others' does not."""
        plain = (own for own, leaf in self._given if not isinstance(leaf.value, ShardedTensor))
        return any(_memory(own) == _memory(local) != 0 for own in plain)

    def note(self, path: str, local: Tensor, tensor: ShardedTensor | None) -> None:
        """Note an output, which nobody may write to if it shares memory. It is a plain copy without ``tensor``."""
        if not self._known:
            self._known = {_memory(own): (leaf.path, None) for own, leaf in self._given}
        place = _memory(local)
        path_there, there = self._known.setdefault(place, (path, tensor))
        if tensor is None:
            return
        if any(step == 0 and size > 1 for size, step in zip(local.shape, local.stride(), strict=True)):
            tensor.share("elements of its own, which were expanded")
        if there is not tensor and place:
            tensor.share(path_there)
            if isinstance(there, ShardedTensor):
                there.share(path)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_view(local: Tensor, own: Tensor) -> bool:
    """Whether an output is a view of an argument, to autograd too, if the argument has a gradient there."""
    if _memory(local) != _memory(own) or not _memory(own) or local.dtype != own.dtype:
        return False
    if local.is_conj() != own.is_conj() or local.is_neg() != own.is_neg():
        return False
    if not local.requires_grad:
        return True
    # A function of the user's may return a view, and a gradient of its own.
    node = local.grad_fn if local._base is own else None
    last = own.grad_fn
    while node is not None and node is not last and not isinstance(node, BackwardCFunction):
        (node, _), *others = node.next_functions or ((None, 0),)
        if others:
            return False
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            return True
    return node is not None and node is last
