"""A process group of the team's own, and what goes through it: buckets of tensors."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from evenly.team.joined import join, split

BUCKET_BYTES = 25 << 20
"""Tensors of one dtype travel together up to this size, as in DistributedDataParallel."""
_SUMMED_BY_GLOO = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
TIMEOUT_SECONDS = 600.0
"""How long to wait for a replica that lives but does not come: it may have much to do before. Whoever waits can be
interrupted, and hears of a death at once."""
_CONNECT_SECONDS = 30.0
"""How long connecting may take once all are there."""
_WATCH_SECONDS = 0.05
_NAP_SECONDS = 50e-6, 1e-3
"""Between two looks at a collective: at first, and at most."""


class GroupError(RuntimeError):
    """A collective was not completed. The group is of no further use."""


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


class Group(ABC):
    """One member of a process group between the replicas of one team. The driver is rank 0.

    What is common to all kinds: how tensors become one flat tensor and come back, and how to wait. No wait is
    unbounded: PyTorch's own would hear neither of Ctrl-C nor of a replica that is about to die.

    Args:
        descriptor: Of memory of :func:`~evenly.team.rendezvous.rendezvous_bytes` that all of them share, in which
            they find each other; it is owned (closed) by the group.
        rank: This replica.
        size: How many there are.
        watch: Called now and then while waiting; raises when the wait has become pointless.

    Raises:
        GroupError: Somebody else could not take part.
        TimeoutError: Somebody did not come.
    """

    def __init__(self, descriptor: int, rank: int, size: int, watch: Callable[[], None]) -> None:
        self.rank = rank
        self.size = size
        self._watch = watch
        self._group = self._meet(descriptor)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Give the driver's values of a bucket to all."""
        joined = join(tensors)
        self._complete(self.start_broadcast, joined.view(torch.uint8))  # bits, whatever they mean
        # The driver's own are not written to: a graph of theirs would take them for changed.
        if self.rank != 0:
            torch._foreach_copy_(tensors, split(joined, tensors))

    def reduce(self, tensors: list[Tensor]) -> None:
        """Give the sum of a bucket over all to the driver; the others keep what they have."""
        joined = join(tensors)
        real = torch.view_as_real(joined) if joined.is_complex() else joined
        wire = real if self.can_sum(real.dtype) else real.float()
        self._complete(self.start_reduce, wire)
        if self.rank == 0:
            found = wire.to(real.dtype)
            result = torch.view_as_complex(found) if joined.is_complex() else found
            torch._foreach_copy_(tensors, split(result.view_as(joined), tensors))

    def leave(self) -> None:
        """Close the connections: whoever waits for this replica gets an error."""
        self._group = None

    def disown(self) -> None:
        """In a forked child: have nothing to do with it. Its threads are not here, so it must not be taken down."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    # ------------------------------------------------------------------ what a kind of group brings

    @abstractmethod
    def connect(self, rendezvous: Any) -> Any:
        """Make PyTorch's own group, through a ``torch.distributed.Store`` in which all of them are. May block."""

    @abstractmethod
    def can_sum(self, dtype: torch.dtype) -> bool:
        """Whether gradients of a real dtype can be summed up as they are; if not, they are summed up as float32."""

    def start_broadcast(self, group: Any, flat: Tensor) -> Any:
        """Begin to give the driver's ``flat`` to all; returns a ``torch.distributed.Work``."""
        return group.broadcast([flat], _to_driver(torch.distributed.BroadcastOptions()))

    def start_reduce(self, group: Any, flat: Tensor) -> Any:
        """Begin to sum up ``flat`` at the driver; returns a ``torch.distributed.Work``."""
        return group.reduce([flat], _to_driver(torch.distributed.ReduceOptions()))

    # ------------------------------------------------------------------ waiting

    def _complete(self, start: Callable[[Any, Tensor], Any], wire: Tensor) -> None:
        nap, longest = _NAP_SECONDS
        patience = _Patience(self._watch, "a collective of all replicas")
        with self._named():
            work = start(self._group, wire)
        try:
            while not work.is_completed():
                time.sleep(nap)
                nap = min(2 * nap, longest)
                patience.check()
            with self._named():
                work.wait()
        finally:
            del work  # it keeps the connections open, and an exception's traceback would keep it

    @contextmanager
    def _named(self) -> Generator[None]:
        """Give what Gloo raises, a bare ``RuntimeError``, a name."""
        try:
            yield
        except RuntimeError as error:
            message = f"replica {self.rank} was left alone in the middle of a collective: {error}"
            raise GroupError(message) from error

    def _meet(self, descriptor: int) -> Any:
        """Connect to the others, in a thread of its own: nothing else could cut it short.

        Should it be cut short, the thread ends by itself: at once, or, if a replica dies in the very moment in which
        they connect, within :data:`_CONNECT_SECONDS`.
        """
        from evenly.team.rendezvous import MeetingFailedError, Rendezvous, close_doors

        try:
            rendezvous = Rendezvous(descriptor, self.rank, self.size)
        finally:
            os.close(descriptor)
        made: list[Any] = []
        failed: list[Exception] = []

        def connect() -> None:
            try:
                rendezvous.await_all()
                made.append(self.connect(rendezvous))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=connect, name="evenly-connect", daemon=True)
        thread.start()
        try:
            patience = _Patience(self._watch, "forming the process group of all replicas")
            while thread.is_alive():
                thread.join(_WATCH_SECONDS)
                patience.check()
            if made:
                close_doors(rendezvous.said)
                return made.pop()
        except BaseException:
            rendezvous.give_up()
            raise
        rendezvous.give_up()
        error = failed.pop()
        try:
            if not isinstance(error, (MeetingFailedError, RuntimeError)):
                raise error
            message = f"replica {self.rank} could not connect to the others: {error}"
            raise GroupError(message) from error
        finally:
            del error  # see [Note: raised later] in `errors`


class Gloo(Group):
    """Gloo over the loopback interface."""

    def connect(self, rendezvous: Any) -> Any:
        """See :class:`Group`."""
        import torch.distributed

        distributed: Any = torch.distributed  # process groups have no complete annotations
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return distributed.ProcessGroupGloo(rendezvous, self.rank, self.size, options)

    def can_sum(self, dtype: torch.dtype) -> bool:
        """See :class:`Group`."""
        return dtype in _SUMMED_BY_GLOO


def _to_driver(options: Any) -> Any:
    """Options of a collective from or to the driver."""
    options.rootRank = 0
    options.timeout = timedelta(seconds=2 * TIMEOUT_SECONDS)  # whoever waits here gives up before
    return options


class _Patience:
    """How long to wait for something: looks around now and then, and ends."""

    def __init__(self, watch: Callable[[], None], what: str) -> None:
        self._watch = watch
        self._what = what
        self._next = time.monotonic() + _WATCH_SECONDS
        self._end = time.monotonic() + TIMEOUT_SECONDS

    def check(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _WATCH_SECONDS
        self._watch()
        if now > self._end:
            message = (
                f"waited {TIMEOUT_SECONDS:g} s for {self._what}: one of them lives, but does not come (is it stopped, "
                "or does a forward or an operation before this one take so long?)"
            )
            raise TimeoutError(message)
