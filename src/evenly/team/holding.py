"""The replica's half of :mod:`evenly.team.collectives`: the parameters that it computes with, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from evenly.team.group import BUCKET_BYTES, Group, buckets
from evenly.team.memory import Block, Placement
from evenly.team.protocol import DTYPES

LeafSpec = tuple[Any, ...]
"""Of a leaf: offset, shape, strides, dtype number; whether it requires grad; whether it is a parameter."""


class Holding(Protocol):
    """One model's parameters in a replica, and where their gradients go."""

    leaves: list[Tensor]

    def private_leaves(self) -> list[Tensor]:
        """Leaves of the same values that can be written to without anybody seeing it."""
        ...

    def lay(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the dense gradients of a backward; the driver will want their sum."""
        ...


class SharedHolding:
    """Leaves in the driver's memory, gradients in memory that the driver sees."""

    def __init__(self, specs: Sequence[LeafSpec], parameters: Block, gradients: Block) -> None:
        self._specs = specs
        self._places = [_place(spec) for spec in specs]
        self._parameters = parameters
        self.leaves = self._leaves_in(parameters)
        self._gradients = [gradients.tensor(place) for place in self._places]

    def _leaves_in(self, block: Block) -> list[Tensor]:
        return [leaf_of(block.tensor(place), spec) for place, spec in zip(self._places, self._specs, strict=True)]

    def private_leaves(self) -> list[Tensor]:
        """Views of a copy-on-write mapping of the same memory."""
        private = self._leaves_in(self._parameters.private())
        return [mine.requires_grad_(leaf.requires_grad) for mine, leaf in zip(private, self.leaves, strict=True)]

    def lay(self, gradients: Sequence[Tensor | None]) -> None:
        """See :class:`Holding`."""
        if all(map(is_dense, gradients)):  # as in most steps
            torch._foreach_copy_(self._gradients, cast("list[Tensor]", gradients))
            return
        pairs = [(into, grad) for into, grad in zip(self._gradients, gradients, strict=True) if is_dense(grad)]
        if pairs:
            torch._foreach_copy_([into for into, _ in pairs], [cast("Tensor", grad) for _, grad in pairs])


class OwnHolding:
    """Leaves in this replica's own memory; parameters come, and gradients go, through the group."""

    def __init__(self, specs: Sequence[LeafSpec]) -> None:
        self._specs = specs
        self.leaves = [
            leaf_of(torch.empty_strided(spec[1], spec[2], dtype=DTYPES[int(spec[3])]), spec) for spec in specs
        ]
        self._gradients: list[Tensor | None] = []

    def private_leaves(self) -> list[Tensor]:
        """Copies."""
        return [
            leaf_of(leaf.detach().clone(), (*spec[:4], leaf.requires_grad, spec[5]))
            for leaf, spec in zip(self.leaves, self._specs, strict=True)
        ]

    def lay(self, gradients: Sequence[Tensor | None]) -> None:
        """See :class:`Holding`."""
        self._gradients = list(gradients)

    def receive(self, group: Group, positions: Sequence[int]) -> None:
        """Take part in the broadcast of some leaves."""
        for bucket in buckets([self.leaves[position].data for position in positions], BUCKET_BYTES):
            group.broadcast(bucket)

    def reduce(self, group: Group, wanted: bytes, *, taking_part: bool) -> None:
        """Take part in the sum of the gradients; where this replica has none it brings zeros."""
        gradients = self._gradients if taking_part and self._gradients else [None] * len(self.leaves)
        self._gradients = []
        brought = [
            cast("Tensor", gradient) if is_dense(gradient) else torch.zeros_like(leaf)
            for gradient, leaf, wants in zip(gradients, self.leaves, wanted, strict=True)
            if wants
        ]
        for bucket in buckets(brought, BUCKET_BYTES):
            group.reduce(bucket)


def leaf_of(tensor: Tensor, spec: LeafSpec) -> Tensor:
    """A leaf as ``spec`` describes it, around ``tensor``."""
    requires_grad, is_parameter = spec[4:]
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def is_dense(gradient: Tensor | None) -> bool:
    """Whether it is a gradient, and not a sparse one."""
    return gradient is not None and gradient.layout is torch.strided


def _place(spec: LeafSpec) -> Placement:
    offset, shape, stride, dtype = spec[:4]
    return Placement(offset, shape, stride, DTYPES[int(dtype)])
