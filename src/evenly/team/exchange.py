"""Small sums over all replicas in the middle of a forward or backward: counts, statistics.

Every replica, the driver included, writes its numbers into a place of its own in shared memory, says so in a counter,
waits for the counters of the others, and adds up all places in the order of the replicas. So all get the same bits.

There are two places per replica, used in turn: whoever writes the second next time knows that everybody has read the
first, because they have all answered in between.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from evenly.team.wire import full_fence

CAPACITY_BYTES = 1 << 16
"""Of one place. Larger tensors are added up in pieces."""
_WORD_BYTES = 64  # a counter has a cache line of its own
_SOMEBODY_SLEEPS = 1
"""Where, behind a counter, those who sleep on it say so."""
_STEPS = 1 << 16
"""More sums than one forward or backward has."""
_NAP_SECONDS = 0.1
_SPIN_SECONDS = 0.002

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, int(_NAP_SECONDS * 1e9))


class ExchangeError(RuntimeError):
    """The replicas do not agree on what they sum up together."""


def exchange_bytes(replicas: int) -> int:
    """Shared memory that ``replicas`` need."""
    return replicas * (_WORD_BYTES + 2 * CAPACITY_BYTES)


class Exchange:
    """One replica's part in the sums over all.

    Args:
        descriptor: Of :func:`exchange_bytes` of shared memory, the same for all replicas; it is not kept.
        replicas: How many share it.
        index: Which one this is.
        watch: Called now and then while waiting; raises when the wait has become pointless.
    """

    def __init__(self, descriptor: int, replicas: int, index: int, watch: Callable[[], None] | None = None) -> None:
        self.index = index
        self.watch = watch
        self._map = mmap.mmap(descriptor, exchange_bytes(replicas))
        self._words = memoryview(self._map)[: replicas * _WORD_BYTES].cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._replicas = replicas
        self._taking_part = 1
        self._first = self._step = 0
        self._spin = _SPIN_SECONDS if replicas <= len(os.sched_getaffinity(0)) else _SPIN_SECONDS / 100

    def begin(self, number: int, taking_part: int) -> None:
        """Start a forward or backward.

        Args:
            number: Its number, the same in all replicas and larger than that of any earlier one.
            taking_part: Replicas 0 to ``taking_part`` - 1 have rows.
        """
        self._taking_part = taking_part
        self._step = self._first = number * _STEPS

    def end(self) -> None:
        """Say that this replica takes part in no further sum of this forward or backward, for whatever reason."""
        self._post(ended=True)

    def refuse(self, number: int) -> None:
        """Take part in no sum of the forward or backward ``number``, which this replica does not even begin."""
        self.begin(number, 1)
        self.end()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over all replicas that take part; all must call this alike.

        Args:
            tensor: Any shape and dtype, the same in all replicas.

        Raises:
            ExchangeError: Another replica has ended its forward or backward, or brought another shape.
        """
        flat = tensor.detach().contiguous().view(-1)
        pieces: tuple[Tensor, ...] = cast("Any", flat).split(
            max(1, (CAPACITY_BYTES - _WORD_BYTES) // max(flat.element_size(), 1))
        )
        summed = [self._sum_piece(piece) for piece in pieces]
        return torch.cat(summed).view(tensor.shape) if summed else flat.view(tensor.shape)

    def _sum_piece(self, piece: Tensor) -> Tensor:
        self._step += 1
        size = piece.numel() * piece.element_size()
        mine = self._place(self.index)
        ctypes.c_uint64.from_address(mine).value = size
        ctypes.memmove(mine + _WORD_BYTES, piece.data_ptr(), size)
        self._post(ended=False)
        total: Tensor | None = None
        for replica in range(self._taking_part):
            self._await(replica)
            place = self._place(replica)
            theirs = ctypes.c_uint64.from_address(place).value
            if theirs != size:
                message = (
                    f"replica {self.index} sums up {size} bytes over all replicas where replica {replica} brings "
                    f"{theirs}: what is summed over the whole batch must have the same shape and dtype in all of them"
                )
                raise ExchangeError(message)
            part = torch.empty_like(piece)
            ctypes.memmove(part.data_ptr(), place + _WORD_BYTES, size)
            total = part if total is None else total.add_(part)
        assert total is not None  # noqa: S101 - replica 0 always takes part
        return total

    def _place(self, replica: int) -> int:
        turn = self._step % 2
        return self._address + self._replicas * _WORD_BYTES + (2 * replica + turn) * CAPACITY_BYTES

    def _post(self, *, ended: bool) -> None:
        # The counter is the number of the step, and one bit that says that no further step follows.
        word = self.index * _WORD_BYTES // 8
        self._words[word] = self._step * 2 + ended
        full_fence()
        if _FUTEX is not None and self._words[word + _SOMEBODY_SLEEPS]:  # the call costs more than all the rest
            self._words[word + _SOMEBODY_SLEEPS] = 0
            _libc.syscall(_FUTEX, ctypes.c_void_p(self._address + self.index * _WORD_BYTES), _FUTEX_WAKE, 1 << 30, None)

    def _await(self, replica: int) -> None:
        word = replica * _WORD_BYTES // 8
        deadline = time.perf_counter() + self._spin
        while (seen := self._words[word]) // 2 < self._step:
            if seen % 2 and seen // 2 >= self._first:
                message = (
                    f"replica {replica} ended without the sum over the whole batch that replica {self.index} waits "
                    "for: all replicas must compute the same losses and statistics inside of forward, not one per row"
                )
                raise ExchangeError(message)
            if time.perf_counter() > deadline:
                self._sleep(replica, seen)
            else:
                os.sched_yield()

    def _sleep(self, replica: int, seen: int) -> None:
        """Block until a counter is no longer what was ``seen``, or for a moment."""
        if _FUTEX is None:
            time.sleep(0.0005)
        else:
            self._words[replica * _WORD_BYTES // 8 + _SOMEBODY_SLEEPS] = 1
            full_fence()
            # The kernel compares the counter's low half with what was seen before it lets us sleep: no wake-up is lost.
            pointer = ctypes.c_void_p(self._address + replica * _WORD_BYTES)
            low = ctypes.c_uint32(seen & 0xFFFFFFFF)
            _libc.syscall(_FUTEX, pointer, _FUTEX_WAIT, low, ctypes.byref(_NAP))
        if self.watch is not None:
            self.watch()
