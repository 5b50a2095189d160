"""The replica's half of :mod:`evenly.team.collectives`: the parameters that it computes with, and its gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from evenly.team.group import BUCKET_BYTES, Group, buckets
from evenly.team.memory import Block, Placement
from evenly.team.protocol import DTYPES

LeafSpec = tuple[Any, ...]
"""Of a leaf: offset, shape, strides, dtype number; whether it requires grad; whether it is a parameter."""


class Laid(NamedTuple):
    """What a backward left of gradients, for the driver to know.

    Attributes:
        present: Per leaf 0: no gradient; 1: a dense one, laid where the sum is made; 2: a sparse one.
        sparse: The sparse ones, in order.
    """

    present: bytes
    sparse: list[Tensor]

    @classmethod
    def of(cls, gradients: Sequence[Tensor | None]) -> Laid:
        """What is said of ``gradients``, the dense ones of which are laid."""
        present = bytes([0 if grad is None else 1 if grad.layout is torch.strided else SPARSE for grad in gradients])
        return cls(present, [grad for grad in gradients if not (grad is None or is_dense(grad))])


SPARSE = 2
"""What is said of a gradient that is there, and not laid: see :class:`Laid`."""
_LARGE_BYTES = 1 << 20
"""Gradients from here on are taken as they come. A hook costs some 10 us, far less than computing such a gradient."""


class Holding(Protocol):
    """One model's parameters in a replica, and where their gradients go."""

    leaves: list[Tensor]

    def private_leaves(self) -> list[Tensor]:
        """Leaves of the same values that can be written to without anybody seeing it."""
        ...

    def taking(self) -> AbstractContextManager[object]:
        """Around a backward: gradients may be taken as they come."""
        ...

    def lay(self, gradients: Sequence[Tensor | None]) -> Laid:
        """Take the other dense gradients of the backward; the driver will want the sum of all."""
        ...


class SharedHolding:
    """Leaves in the driver's memory, gradients in memory that the driver sees."""

    def __init__(self, specs: Sequence[LeafSpec], blocks: Sequence[Block]) -> None:
        parameters, gradients = blocks
        self._specs = specs
        self._places = [_place(spec) for spec in specs]
        self._parameters = parameters
        self.leaves = self._leaves_in(parameters)
        self._gradients = [gradients.tensor(place) for place in self._places]
        self._large = [position for position, leaf in enumerate(self.leaves) if leaf.nbytes >= _LARGE_BYTES]
        self._taken: set[int] = set()

    def _leaves_in(self, block: Block) -> list[Tensor]:
        return [leaf_of(block.tensor(place), spec) for place, spec in zip(self._places, self._specs, strict=True)]

    def private_leaves(self) -> list[Tensor]:
        """Views of a copy-on-write mapping of the same memory."""
        private = self._leaves_in(self._parameters.private())
        return [mine.requires_grad_(leaf.requires_grad) for mine, leaf in zip(private, self.leaves, strict=True)]

    @contextlib.contextmanager
    def taking(self) -> Generator[None]:
        """See :class:`Holding`.

        Large gradients go to the shared memory as soon as autograd has them: while they are in the cache, and so that
        there is never a second copy of all.
        """
        self._taken.clear()
        leaves = [(position, self.leaves[position]) for position in self._large]
        hooks: list[Any] = [
            cast("Any", leaf).register_post_accumulate_grad_hook(functools.partial(self._take, position))
            for position, leaf in leaves
            if leaf.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, position: int, leaf: Tensor) -> None:
        gradient = leaf.grad
        if gradient is None or not is_dense(gradient):
            return
        # Re-entrant checkpointing brings the gradient of one leaf in several parts.
        if position in self._taken:
            self._gradients[position].add_(gradient)
        else:
            self._gradients[position].copy_(gradient)
            self._taken.add(position)
        leaf.grad = None

    def lay(self, gradients: Sequence[Tensor | None]) -> Laid:
        """See :class:`Holding`."""
        if self._taken:
            gradients = [self._with_taken(position, gradient) for position, gradient in enumerate(gradients)]
            rest = [None if position in self._taken else grad for position, grad in enumerate(gradients)]
            self._copy(rest)
        else:
            self._copy(gradients)
        return Laid.of(gradients)

    def _with_taken(self, position: int, gradient: Tensor | None) -> Tensor | None:
        if position not in self._taken:
            return gradient
        shared = self._gradients[position]
        return shared if gradient is None else shared.add_(gradient)

    def _copy(self, gradients: Sequence[Tensor | None]) -> None:
        if gradients and all(map(is_dense, gradients)):  # as in most steps
            torch._foreach_copy_(self._gradients, cast("list[Tensor]", gradients))
            return
        pairs = [(into, grad) for into, grad in zip(self._gradients, gradients, strict=True) if is_dense(grad)]
        if pairs:
            torch._foreach_copy_([into for into, _ in pairs], [cast("Tensor", grad) for _, grad in pairs])


class OwnHolding:
    """Leaves in this replica's own memory; parameters come, and gradients go, through the group."""

    def __init__(self, specs: Sequence[LeafSpec], blocks: Sequence[Block] = ()) -> None:
        del blocks  # nothing is shared
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

    def taking(self) -> AbstractContextManager[object]:
        """See :class:`Holding`."""
        return contextlib.nullcontext()

    def lay(self, gradients: Sequence[Tensor | None]) -> Laid:
        """See :class:`Holding`."""
        self._gradients = list(gradients)
        return Laid.of(gradients)

    def receive(self, group: Group, positions: Sequence[int]) -> None:
        """Take part in the broadcast of some leaves."""
        for bucket in buckets([self.leaves[position].data for position in positions], BUCKET_BYTES):
            group.broadcast(bucket)

    def reduce(self, group: Group, wanted: bytes, *, bringing: bool) -> None:
        """Take part in the sum of the gradients; where this replica has none it brings zeros."""
        gradients = self._gradients if bringing and self._gradients else [None] * len(self.leaves)
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
