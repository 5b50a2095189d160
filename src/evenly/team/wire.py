"""Frames between the driver and a replica: two rings in shared memory, and a socket to wake who sleeps.

A frame is a short header (the caller's bytes) followed by the raw bytes of any number of tensors. Both travel
through a ring: a fixed piece of anonymous shared memory with one writer and one reader, who publish how far they
are in two counters. What is larger than the ring streams through it. Nothing is allocated per frame.

[Note: waiting] Waking a sleeping process costs hundreds of microseconds, watching a counter costs one. So whoever
waits first watches the counter for a few milliseconds, then says in a third word that it sleeps and blocks on the
socket. The other side sends one message only to a sleeper. The socket also tells at once when the other side dies,
and carries file descriptors.

[Note: interruptions] Ctrl-C may raise between any two lines here. How far this end has *read* is told by the ring's
counters alone, and the end of the present frame is noted before any of it is consumed: so an interrupted read can be
passed over. A frame that was not written whole cannot be mended; the channel then says that it is :attr:`broken`.
"""

from __future__ import annotations

import array
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
_WRITTEN, _READ, _READER_SLEEPS, _WRITER_SLEEPS, _INTERRUPT = 0, 8, 16, 24, 32

_PREFIX = struct.Struct("<IQ")
"""Before every frame: bytes of the header, bytes of the tensors behind it."""
_TOKEN = struct.Struct("<Q")
"""A message that brings file descriptors: what the frame that they are for calls them."""
_WAKE_UP = b"!"
_RIGHTS_BYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)
# A closed socket is an error to be raised, also in programs that let SIGPIPE end them.
_SEND_FLAGS = socket.MSG_NOSIGNAL

SPIN_SECONDS = 0.003
"""How long to watch the counter before blocking. A step's pauses (an optimizer, a small batch) are shorter."""
_SPINS_PER_CLOCK = 50
_MOST_HELD_BYTES = 1 << 16
_PIECE_BYTES = RING_BYTES // 4
"""Large tensors move in pieces, so that the reader copies out what is there while the rest is being copied in."""
_NAP_SECONDS = 0.5
"""Upper bound of one blocking wait: a missed wake-up, should a CPU reorder the two flags, costs this much."""


class ChannelClosedError(ConnectionError):
    """The other side of a channel is gone."""


def spin_seconds(processes: int) -> float:
    """How long one of ``processes`` waiting processes may spin: not at all when they outnumber the cores."""
    return SPIN_SECONDS if processes <= len(os.sched_getaffinity(0)) else SPIN_SECONDS / 60


def full_fence() -> None:
    """A full memory barrier: between "I published" and "do you sleep?" the store must leave the CPU before the load.

    Taking a lock is the portable way to one in Python. A new lock, because Ctrl-C could leave a common one locked.
    """
    threading.Lock().acquire(blocking=False)


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
        sock: This end's socket, of a pair that keeps messages apart (``SOCK_SEQPACKET``); it is made non-blocking.
        memory: Descriptor of ``CHANNEL_BYTES`` of shared memory; both ends map the same.
        driver: Whether this is the driver's end.
        spin: Seconds to watch a counter before blocking.

    Attributes:
        broken: A frame was cut off while it was written: what follows would make no sense to the other side.
        watch: Called now and then while waiting: raises when the wait has become pointless.
    """

    def __init__(self, sock: socket.socket, memory: int, *, driver: bool, spin: float = SPIN_SECONDS) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.spin = spin
        self.broken = False
        self.watch: Callable[[], None] | None = None
        self._map = mmap.mmap(memory, CHANNEL_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        rings = [_Ring(self._map, address, offset) for offset in (0, HEADER_BYTES + RING_BYTES)]
        self._out, self._in = rings if driver else rings[::-1]
        self._from_driver = rings[0]
        self._frame_end = 0  # of the present incoming frame, in bytes since the beginning
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._descriptors: deque[tuple[int, list[int]]] = deque()  # what arrived and nobody has claimed yet
        self._held = b""  # frames to be written together with the next one

    # ---------------------------------------------------------------- writing

    def send(self, header: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Write a frame: ``header``, then the bytes of contiguous CPU ``tensors``. Waits only when the ring is full."""
        size = 0
        for tensor in tensors:
            size += tensor.numel() * tensor.element_size()
        self.broken = True  # until the frame is whole
        held, self._held = self._held, b""
        self._write_bytes(held + _PREFIX.pack(len(header), size) + header)
        if size > _PIECE_BYTES:
            self._wake(self._out, _READER_SLEEPS)
        for tensor in tensors:
            count = tensor.numel() * tensor.element_size()
            if count:
                self._write_memory(tensor.data_ptr(), count)
        self.broken = False
        self._wake(self._out, _READER_SLEEPS)

    def hold(self, header: bytes) -> None:
        """Have a frame without tensors, which is in no hurry, written with the next one: two cost less at once."""
        self._held += _PREFIX.pack(len(header), 0) + header
        if len(self._held) > _MOST_HELD_BYTES:
            held, self._held = self._held, b""
            self.broken = True  # until they are written whole
            self._write_bytes(held)
            self.broken = False
            self._wake(self._out, _READER_SLEEPS)

    def _write_bytes(self, data: bytes) -> None:
        ring, done = self._out, 0
        words, size = ring.words, len(data)
        written = words[_WRITTEN]
        start = written % RING_BYTES
        if size <= min(RING_BYTES - start, RING_BYTES - (written - words[_READ])):  # as nearly always
            ring.data[start : start + size] = data
            words[_WRITTEN] = written + size
            return
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
            count = min(room, size - done, _PIECE_BYTES)
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
        """Wait for the next frame and return its header; its tensors are taken with :meth:`receive_into`.

        What nobody took of the frame before is passed over.
        """
        ring = self._in
        words = ring.words
        if words[_READ] < self._frame_end:
            self.skip()
        start = words[_READ]
        while (written := words[_WRITTEN]) - start < _PREFIX.size:
            self._wait(words, _WRITTEN, written, _READER_SLEEPS)
        header_size, size = _PREFIX.unpack(self._peek(start, _PREFIX.size))
        behind = start + _PREFIX.size + header_size
        self._frame_end = behind + size
        place = (start + _PREFIX.size) % RING_BYTES
        if behind <= words[_WRITTEN] and place + header_size <= RING_BYTES:  # as nearly always
            header = bytes(ring.data[place : place + header_size])
            self._consume(ring, _PREFIX.size + header_size)
            return header
        self._consume(ring, _PREFIX.size)
        return self._read_bytes(header_size)

    def receive_into(self, tensor: Tensor) -> None:
        """Fill a contiguous CPU ``tensor`` with the next bytes of the frame."""
        ring, done = self._in, 0
        size, pointer = tensor.numel() * tensor.element_size(), tensor.data_ptr()
        if size > self._left():
            message = f"a tensor of {size} bytes was expected, but {self._left()} bytes are left of the frame"
            raise ValueError(message)
        while done < size:
            ready, start = self._ready(ring)
            count = min(ready, size - done, _PIECE_BYTES)
            ctypes.memmove(pointer + done, ring.address + start, count)
            self._consume(ring, count)
            done += count

    def skip(self) -> None:
        """Pass over what is left of the present frame."""
        while left := self._left():
            ready, _ = self._ready(self._in)
            self._consume(self._in, min(ready, left))

    def _left(self) -> int:
        """Bytes of the present frame that nobody has read yet."""
        return max(0, self._frame_end - self._in.words[_READ])

    @property
    def untouched(self) -> bool:
        """Whether no frame has been received yet, not even a part of one."""
        return self._frame_end == 0

    def _peek(self, position: int, size: int) -> bytes:
        start = position % RING_BYTES
        data = bytes(self._in.data[start : start + size])
        return data if len(data) == size else data + bytes(self._in.data[: size - len(data)])

    def _read_bytes(self, size: int) -> bytes:
        ring = self._in
        if not size:
            return b""
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

    # ---------------------------------------------------------------- waiting, see the note

    def _wake(self, ring: _Ring, flag: int) -> None:
        full_fence()
        if ring.words[flag]:
            try:
                self.socket.send(_WAKE_UP, _SEND_FLAGS)
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
            full_fence()
            try:
                if words[word] != value:
                    return
                ready = self._poll.poll(_NAP_SECONDS * 1000)
            finally:
                words[flag] = 0
            alive = not ready or self.take_descriptors()
            if words[word] != value:
                return
            if not alive:
                message = "the other process closed its end"
                raise ChannelClosedError(message)
            if self.watch is not None:
                self.watch()

    def also_watch(self, descriptor: int) -> None:
        """Let ``descriptor`` being closed by its other end (another replica dying) interrupt a blocking wait, too."""
        self._poll.register(descriptor, select.POLLHUP | select.POLLERR | select.POLLRDHUP)

    # ---------------------------------------------------------------- beside the frames

    def interrupt(self, token: int) -> None:
        """Let the replica know that nobody wants what it is doing; ``token`` grows with every interruption."""
        self._from_driver.words[_INTERRUPT] = token

    def interruption(self) -> int:
        """The last token given to :meth:`interrupt` at the driver's end; 0 if there was none."""
        return self._from_driver.words[_INTERRUPT]

    def send_descriptors(self, token: int, descriptors: Sequence[int]) -> None:
        """Hand the other side copies of ``descriptors``, before the frame that tells it ``token``."""
        # socket.send_fds takes no flags before Python 3.12, and socket.recv_fds drops them.
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        while True:
            try:
                self.socket.sendmsg([_TOKEN.pack(token)], [rights], _SEND_FLAGS)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.socket, select.POLLOUT)
                poll.poll(_NAP_SECONDS * 1000)
                if self.watch is not None:
                    self.watch()
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            else:
                return

    def claim_descriptors(self, token: int) -> list[int]:
        """The descriptors that the other side has sent with ``token``; those of tokens before it are closed.

        An interrupted sender may have sent descriptors without the frame that they were for.

        Raises:
            LookupError: They have not been sent.
        """
        self.take_descriptors()
        while self._descriptors:
            found, descriptors = self._descriptors.popleft()
            if found == token:
                return descriptors
            for descriptor in descriptors:
                os.close(descriptor)
        message = f"no descriptors came with token {token}"
        raise LookupError(message)

    def take_descriptors(self) -> bool:
        """Read what the socket holds without waiting. False when the other side is gone."""
        while True:
            try:
                data, rights, _, _ = self.socket.recvmsg(_TOKEN.size, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return True
            except OSError:
                return False
            for _, _, content in rights:
                self._descriptors.append((_TOKEN.unpack(data)[0], array.array("i", content).tolist()))
            if not data:
                return False

    def close(self) -> None:
        """Close this end's socket. The mapping goes with the last reference to it."""
        self.socket.close()
        while self._descriptors:
            for descriptor in self._descriptors.popleft()[1]:
                os.close(descriptor)


def channel_sockets() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel's socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def channel_memory() -> int:
    """A descriptor of zeroed anonymous shared memory for one channel."""
    descriptor = os.memfd_create("evenly-channel", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, CHANNEL_BYTES)
    return descriptor
