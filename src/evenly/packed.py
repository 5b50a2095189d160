"""Packed sequences: cut by samples, and put together again.

A `PackedSequence` holds its steps time-major, longest sample first. A batch is about samples in the order in
which the user packed them, so both directions come down to one index into `.data`, which autograd can follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Sequence


class Layout(NamedTuple):
    """Where the steps of each sample lie in `.data`; everything of a packed sequence but its values.

    Attributes:
        batch_sizes: Number of samples that have a step t, int64, on the CPU.
        sorted_indices: The sample at each place of the sorted order, or None when samples are packed as they
            were.
        unsorted_indices: The place of each sample in the sorted order, or None.
    """

    batch_sizes: torch.Tensor
    sorted_indices: torch.Tensor | None
    unsorted_indices: torch.Tensor | None

    @property
    def size(self) -> int:
        """Number of samples."""
        return int(self.batch_sizes[0])

    def places(self) -> torch.Tensor:
        """For each sample, in the user's order, its place in the sorted order."""
        return torch.arange(self.size) if self.unsorted_indices is None else self.unsorted_indices.cpu()

    def lengths(self) -> torch.Tensor:
        """Number of steps of each sample, in the user's order."""
        return (self.batch_sizes[None, :] > self.places()[:, None]).sum(dim=1)

    def starts(self) -> torch.Tensor:
        """Where each time step begins in `.data`."""
        return self.batch_sizes.cumsum(0) - self.batch_sizes

    def pack(self, data: torch.Tensor) -> PackedSequence:
        """The packed sequence of this layout with the given steps, of shape [sum of lengths, ...]."""

        def beside(index: torch.Tensor | None) -> torch.Tensor | None:
            return None if index is None else index.to(data.device)

        return PackedSequence(data, self.batch_sizes, beside(self.sorted_indices), beside(self.unsorted_indices))


def layout_of(packed: PackedSequence) -> Layout:
    """The layout of a packed sequence."""
    return Layout(packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


def select_samples(layout: Layout, samples: Sequence[int]) -> tuple[torch.Tensor, Layout]:
    """Cuts samples out of a packed sequence.

    Args:
        layout: Of the whole.
        samples: Which samples, in the user's order of the whole.

    Returns:
        The index into the whole's `.data`, int64, and the layout of the part: `layout.pack(data[index])`.
    """
    chosen = torch.tensor(list(samples), dtype=torch.int64)
    places, lengths = layout.places()[chosen], layout.lengths()[chosen]
    part, order = _layout_for(lengths, keep_order=layout.unsorted_indices is None)
    steps, has_step = _steps(lengths[order])
    index = (layout.starts()[steps][:, None] + places[order][None, :])[has_step]
    return index, part


def join_samples(layouts: Sequence[Layout], like: Layout | None = None) -> tuple[torch.Tensor, Layout]:
    """Puts the packed sequences of all replicas together, the samples of the first replica first.

    Args:
        layouts: One per replica.
        like: The layout of a packed input. When lengths agree it decides on the order of samples of equal
            length, which is the order that the module alone would have kept.

    Returns:
        The index into the concatenation of all `.data`, and the layout of the whole.
    """
    lengths = torch.cat([layout.lengths() for layout in layouts])
    if like is not None and torch.equal(like.lengths(), lengths):
        whole, order = like, torch.argsort(like.places())
    else:
        whole, order = _layout_for(lengths, keep_order=all(layout.unsorted_indices is None for layout in layouts))
    offset = 0
    longest = int(lengths.max())
    # Row i of the table says where the steps of sample i lie in the concatenation, as far as the sample goes.
    table = torch.zeros(len(lengths), longest, dtype=torch.int64)
    row = 0
    for layout in layouts:
        starts = layout.starts()
        table[row : row + layout.size, : len(starts)] = layout.places()[:, None] + starts[None, :] + offset
        row += layout.size
        offset += int(layout.batch_sizes.sum())
    _, has_step = _steps(lengths[order])
    return table[order].T[has_step], whole


def _layout_for(lengths: torch.Tensor, *, keep_order: bool) -> tuple[Layout, torch.Tensor]:
    """The layout of samples of these lengths, and the samples in sorted order."""
    _, has_step = _steps(lengths)
    batch_sizes = has_step.sum(dim=1)
    if keep_order and bool((lengths[:-1] >= lengths[1:]).all()):
        return Layout(batch_sizes, None, None), torch.arange(len(lengths))
    order = torch.sort(lengths, descending=True, stable=True).indices
    return Layout(batch_sizes, order, torch.argsort(order)), order


def _steps(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The time steps 0, 1, … and for each, whether each sample has it: shape [steps, samples]."""
    steps = torch.arange(int(lengths.max()))
    return steps, lengths[None, :] > steps[:, None]
