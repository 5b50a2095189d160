"""Frames between the driver and a replica: two rings in shared memory, and a socket to wake who sleeps.

A frame is a short header (the caller's bytes) followed by the raw bytes of any number of tensors. Both travel
through a ring: a fixed piece of anonymous shared memory with one writer and one reader, who publish how far they
are in two counters. What is larger than the ring streams through it. Nothing is allocated per frame.

[Note: waiting] Waking a sleeping process costs hundreds of microseconds, watching a counter costs one. So whoever
waits first watches the counter for a few milliseconds, then says in a third word that it sleeps and blocks on the
socket. The other side sends one byte only to a sleeper. The socket also tells at once when the other side dies,
and carries file descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RING_BYTES = 4 << 20
"""Size of one direction's ring. Larger tensors stream through in pieces, written and read at the same time."""
HEADER_BYTES = 4096
CHANNEL_BYTES = 2 * (HEADER_BYTES + RING_BYTES)

# Words of a ring's header, each on a cache line of its own so that the two sides do not fight over one.
_WRITTEN, _READ, _READER_SLEEPS, _WRITER_SLEEPS = 0, 8, 16, 24

_PREFIX = struct.Struct("<IQ")
"""Before every frame: bytes of the header, bytes of the tensors behind it."""

SPIN_SECONDS = 0.003
"""How long to watch the counter before blocking. A step's pauses (an optimizer, a small batch) are shorter."""
_SPINS_PER_CLOCK = 50
_NAP_SECONDS = 0.5
"""Upper bound of one blocking wait: a missed wake-up, should a CPU reorder the two flags, costs this much."""

# Taking a lock is the portable way to a full memory barrier in Python: between "I published" and "do you sleep?"
# the store must have left the CPU before the load.
_fence = threading.Lock()


class ChannelClosedError(ConnectionError):
    """The other side of a channel is gone."""


def spin_seconds(processes: int) -> float:
    """How long one of ``processes`` waiting processes may spin: not at all when they outnumber the cores."""
    return SPIN_SECONDS if processes <= len(os.sched_getaffinity(0)) else SPIN_SECONDS / 60


class _Ring:
    """One direction: a header of counters and ``RING_BYTES`` of data inside a larger mapping."""

    __slots__ = ("_map", "address", "data", "words")

    def __init__(self, mapping: mmap.mmap, address: int, offset: int) -> None:
        self._map = mapping
        view = memoryview(mapping)
        self.words = view[offset : offset + HEADER_BYTES].cast("Q")
        self.data = view[offset + HEADER_BYTES : offset + HEADER_BYTES + RING_BYTES]
        self.address = address + offset + HEADER_BYTES


class Channel:
    """One end of the line between the driver and a replica. Not thread-safe: the team's lock guards it.

    Args:
        sock: This end's socket; it is made non-blocking.
        memory: Descriptor of ``CHANNEL_BYTES`` of shared memory; both ends map the same.
        driver: Whether this is the driver's end.
        spin: Seconds to watch a counter before blocking.
    """

    def __init__(self, sock: socket.socket, memory: int, *, driver: bool, spin: float = SPIN_SECONDS) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.spin = spin
        self.descriptors: deque[int] = deque()
        """File descriptors that arrived over the socket and nobody has claimed yet."""
        self.broken = False
        """A frame was cut off in the middle of being written: the stream makes no sense to the other side any more."""
        self._map = mmap.mmap(memory, CHANNEL_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        rings = [_Ring(self._map, address, offset) for offset in (0, HEADER_BYTES + RING_BYTES)]
        self._out, self._in = rings if driver else rings[::-1]
        self._unread = 0  # bytes of the present frame that nobody has read yet
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.watch: Callable[[], None] | None = None
        """Called now and then while waiting: raises when the wait has become pointless."""

    # ---------------------------------------------------------------- writing

    def send(self, header: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Write a frame: ``header``, then the bytes of contiguous CPU ``tensors``. Waits only when the ring is full."""
        size = 0
        for tensor in tensors:
            size += tensor.numel() * tensor.element_size()
        self.broken = True  # until the frame is whole
        self._write_bytes(_PREFIX.pack(len(header), size) + header)
        for tensor in tensors:
            count = tensor.numel() * tensor.element_size()
            if count:
                self._write_memory(tensor.data_ptr(), count)
        self.broken = False
        self._wake(self._out, _READER_SLEEPS)

    def _write_bytes(self, data: bytes) -> None:
        ring, done = self._out, 0
        while done < len(data):
            room, start = self._room(ring)
            count = min(room, len(data) - done)
            ring.data[start : start + count] = data[done : done + count]
            ring.words[_WRITTEN] += count
            done += count

    def _write_memory(self, pointer: int, size: int) -> None:
        ring, done = self._out, 0
        while done < size:
            room, start = self._room(ring)
            # A piece at a time, so that the reader copies out what is there while the rest is being copied in.
            count = min(room, size - done, RING_BYTES // 4)
            ctypes.memmove(ring.address + start, pointer + done, count)
            ring.words[_WRITTEN] += count
            done += count

    def _room(self, ring: _Ring) -> tuple[int, int]:
        """Contiguous bytes that may be written now, and where; waits until there are some."""
        words = ring.words
        written = words[_WRITTEN]
        if written - words[_READ] == RING_BYTES:
            self._wake(ring, _READER_SLEEPS)
            self._wait(words, _READ, written - RING_BYTES, _WRITER_SLEEPS)
        start = written % RING_BYTES
        return min(RING_BYTES - (written - words[_READ]), RING_BYTES - start), start

    # ---------------------------------------------------------------- reading

    def receive(self) -> bytes:
        """Wait for the next frame and return its header; its tensors must be taken with :meth:`receive_into`."""
        size, self._unread = _PREFIX.unpack(self._read_bytes(_PREFIX.size))
        self._unread += size
        header = self._read_bytes(size)
        self._unread -= size
        return header

    def receive_into(self, tensor: Tensor) -> None:
        """Fill a contiguous CPU ``tensor`` with the next bytes of the frame."""
        ring, done = self._in, 0
        size, pointer = tensor.numel() * tensor.element_size(), tensor.data_ptr()
        while done < size:
            ready, start = self._ready(ring)
            count = min(ready, size - done, RING_BYTES // 4)
            ctypes.memmove(pointer + done, ring.address + start, count)
            self._consume(ring, count)
            self._unread -= count
            done += count

    def skip(self) -> None:
        """Pass over what is left of the present frame."""
        while self._unread:
            ready, _ = self._ready(self._in)
            count = min(ready, self._unread)
            self._consume(self._in, count)
            self._unread -= count

    def ready(self) -> bool:
        """Whether something of a next frame has arrived."""
        words = self._in.words
        return words[_WRITTEN] != words[_READ]

    def _read_bytes(self, size: int) -> bytes:
        ring = self._in
        ready, start = self._ready(ring)
        if ready >= size:
            data = bytes(ring.data[start : start + size])
            self._consume(ring, size)
            return data
        pieces: list[bytes] = []
        while size:
            ready, start = self._ready(ring)
            count = min(ready, size)
            pieces.append(bytes(ring.data[start : start + count]))
            self._consume(ring, count)
            size -= count
        return b"".join(pieces)

    def _ready(self, ring: _Ring) -> tuple[int, int]:
        """Contiguous bytes that may be read now, and where; waits until there are some."""
        words = ring.words
        read = words[_READ]
        if words[_WRITTEN] == read:
            self._wait(words, _WRITTEN, read, _READER_SLEEPS)
        start = read % RING_BYTES
        return min(words[_WRITTEN] - read, RING_BYTES - start), start

    def _consume(self, ring: _Ring, count: int) -> None:
        ring.words[_READ] += count
        if ring.words[_WRITER_SLEEPS]:
            self._wake(ring, _WRITER_SLEEPS)

    # ---------------------------------------------------------------- waiting (see [Note: waiting])

    def _wake(self, ring: _Ring, flag: int) -> None:
        with _fence:
            pass
        if ring.words[flag]:
            try:
                self.socket.send(b"!")
            except BlockingIOError:
                pass  # the sleeper has unread wake-ups already
            except OSError as error:
                raise ChannelClosedError(str(error)) from error

    def _wait(self, words: memoryview, word: int, value: int, flag: int) -> None:
        """Return once ``words[word]`` is no longer ``value``."""
        deadline = time.perf_counter() + self.spin
        while True:
            for _ in range(_SPINS_PER_CLOCK):
                if words[word] != value:
                    return
            if time.perf_counter() > deadline:
                break
            os.sched_yield()
        while True:
            words[flag] = 1
            with _fence:
                pass
            try:
                if words[word] != value:
                    return
                ready = self._poll.poll(_NAP_SECONDS * 1000)
            finally:
                words[flag] = 0
            if words[word] != value:
                return
            if ready:
                self._drain(words, word, value)
            if self.watch is not None:
                self.watch()

    def also_watch(self, descriptor: int) -> None:
        """Let ``descriptor`` becoming readable (another replica dying) interrupt a blocking wait, too."""
        self._poll.register(descriptor, select.POLLHUP | select.POLLERR | select.POLLRDHUP)

    def _drain(self, words: memoryview, word: int, value: int) -> None:
        """Take wake-ups and descriptors off the socket; raise when the other side has closed it."""
        alive = self.take_descriptors()
        if not alive and words[word] == value:
            message = "the other process closed its end"
            raise ChannelClosedError(message)

    def take_descriptors(self) -> bool:
        """Read what the socket holds without waiting. False when the other side is gone."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 256, 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            self.descriptors.extend(descriptors)
            if not data:
                return False

    def send_descriptor(self, descriptor: int) -> None:
        """Hand the other side a copy of ``descriptor``; it finds it in :attr:`descriptors` in the order sent."""
        deadline = time.perf_counter() + 10
        while True:
            try:
                socket.send_fds(self.socket, [b"@"], [descriptor])
            except BlockingIOError:
                if time.perf_counter() > deadline:
                    raise
                select.select([], [self.socket], [], _NAP_SECONDS)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            else:
                return

    def claim_descriptor(self) -> int:
        """The next descriptor that the other side has sent; the frame that mentions it comes after it."""
        if not self.descriptors and not self.take_descriptors() and not self.descriptors:
            message = "the other process closed its end before its descriptor came"
            raise ChannelClosedError(message)
        return self.descriptors.popleft()

    def close(self) -> None:
        """Close this end's socket. The mapping goes with the last reference to it."""
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())


def channel_memory() -> int:
    """A descriptor of zeroed anonymous shared memory for one channel."""
    descriptor = os.memfd_create("evenly-channel", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, CHANNEL_BYTES)
    return descriptor
