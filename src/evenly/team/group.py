"""A process group of the team's own, and what goes through it: buckets of tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from evenly.team.joined import join, split

BUCKET_BYTES = 25 << 20
"""Tensors of one dtype travel together up to this size, as in DistributedDataParallel."""
_UNKNOWN_TO_GLOO = {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64}
TIMEOUT = timedelta(seconds=60)


def buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Tensors in groups of one dtype and at most ``limit`` bytes (or one tensor), in order."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or size + count > limit):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += count
    if bucket:
        yield bucket


class Group:
    """Gloo between the replicas of one team, over the loopback interface. The driver is rank 0.

    Args:
        descriptor: Of an anonymous file that all of them share, in which they find each other; it is
            owned (closed) by the group.
        rank: This replica.
        size: How many there are.
    """

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        import torch.distributed

        distributed: Any = torch.distributed  # process groups have no complete annotations
        store = distributed.FileStore(f"/proc/self/fd/{descriptor}", size)
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._distributed = distributed
        self._rank = rank
        self._close = weakref.finalize(self, os.close, descriptor)
        self._group: Any = distributed.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Give the driver's values of a bucket to all."""
        options = self._distributed.BroadcastOptions()
        options.rootRank = 0
        # The driver's own are not written to: a graph of theirs would take them for changed.
        self._run(tensors, lambda flat: self._group.broadcast([flat], options), keep=self._rank == 0)

    def reduce(self, tensors: list[Tensor]) -> None:
        """Give the sum of a bucket over all to the driver; the others keep what they have."""
        options = self._distributed.ReduceOptions()
        options.rootRank = 0
        self._run(tensors, lambda flat: self._group.reduce([flat], options), keep=self._rank != 0)

    @staticmethod
    def _run(tensors: list[Tensor], collective: Callable[[Tensor], Any], *, keep: bool) -> None:
        joined = join(tensors)
        real = torch.view_as_real(joined) if joined.is_complex() else joined
        wire = real.to(torch.int64) if real.dtype in _UNKNOWN_TO_GLOO else real
        collective(wire).wait()
        if not keep:
            found = wire.to(real.dtype)
            result = torch.view_as_complex(found) if joined.is_complex() else found
            torch._foreach_copy_(tensors, split(result.view_as(joined), tensors))
