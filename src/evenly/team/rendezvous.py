"""Where replicas find each other to form a process group: no path, and no port that stays open.

PyTorch's own stores will not do. One in a file takes the file's name, and opens it again long afterwards; one behind a
port is there for everybody on the machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

_REGION_BYTES = 1 << 16
"""What one replica may say. It is some sixty bytes per replica."""
_USED, _GAVE_UP = 0, 1  # words of a region, before the records
_HEADER_BYTES = 16
_LENGTHS = struct.Struct("<II")
"""Before a record: bytes of its key, bytes of its value."""
_NAP_SECONDS = 0.001
_HERE = "here"
# Linux' number for it, on all architectures but two that PyTorch knows nothing of.
_SO_ATTACH_FILTER = 26
_FILTER_INSTRUCTION = struct.Struct("HBBI")
_FILTER_PROGRAM = struct.Struct("HP")
_RETURN = 6

_Store: type[Any] = torch.distributed.Store


class MeetingFailedError(ConnectionError):
    """Somebody does not come any more."""


def rendezvous_bytes(replicas: int) -> int:
    """Shared memory that ``replicas`` need to find each other."""
    return replicas * _REGION_BYTES


class Rendezvous(_Store):  # not final: PyTorch calls its methods from C++
    """What each of them says, readable for all. Everyone writes into a region of its own: no lock is needed.

    Args:
        descriptor: Of zeroed memory of :func:`rendezvous_bytes`; it is not kept.
        rank: This replica.
        size: How many there are.
    """

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        parent: Any = super()
        parent.__init__()
        self.said: list[bytes] = []
        """All that this replica has said."""
        self._map = mmap.mmap(descriptor, rendezvous_bytes(size))
        self._words = memoryview(self._map).cast("Q")
        self._rank = rank
        self._size = size

    def await_all(self) -> None:
        """Return once everybody is here.

        Raises:
            MeetingFailedError: Somebody gave up.
        """
        self.set(f"{_HERE}/{self._rank}", b"")
        for rank in range(self._size):
            self.get(f"{_HERE}/{rank}")

    def give_up(self) -> None:
        """Let nobody wait for this replica any more, nor this one for anybody."""
        self._words[self._word(self._rank, _GAVE_UP)] = 1

    # ------------------------------------------------------------------ what PyTorch calls

    def set(self, key: str, value: bytes) -> None:
        """Say something."""
        name = key.encode()
        self.said.append(bytes(value))
        record = _LENGTHS.pack(len(name), len(value)) + name + value
        used = self._words[self._word(self._rank, _USED)]
        if _HEADER_BYTES + used + len(record) > _REGION_BYTES:
            message = f"there is no room for {len(record)} more bytes about replica {self._rank}"
            raise MeetingFailedError(message)
        start = self._rank * _REGION_BYTES + _HEADER_BYTES + used
        self._map[start : start + len(record)] = record
        self._words[self._word(self._rank, _USED)] = used + len(record)

    def get(self, key: str) -> bytes:
        """What somebody said; waits for it."""
        name = key.encode()
        while (found := self._find(name)) is None:
            for rank in range(self._size):
                if self._words[self._word(rank, _GAVE_UP)]:
                    message = f"replica {rank} does not take part in the process group"
                    raise MeetingFailedError(message)
            time.sleep(_NAP_SECONDS)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for several; whoever waits for the group knows when to give up."""
        del timeout
        for key in keys:
            self.get(key)

    # ------------------------------------------------------------------

    @staticmethod
    def _word(rank: int, which: int) -> int:
        return rank * _REGION_BYTES // 8 + which

    def _find(self, name: bytes) -> bytes | None:
        for rank in range(self._size):
            position = rank * _REGION_BYTES + _HEADER_BYTES
            end = position + self._words[self._word(rank, _USED)]
            while position < end:
                lengths = _LENGTHS.unpack_from(self._map, position)
                position += _LENGTHS.size
                if self._map[position : position + lengths[0]] == name:
                    start = position + lengths[0]
                    return self._map[start : start + lengths[1]]
                position += sum(lengths)
        return None


def close_doors(said: Sequence[bytes]) -> None:
    """Let nobody else connect to the ports that were told to others.

    Gloo listens for as long as a group lives, although nobody has to come any more once all are connected. A filter
    that takes no packet makes the port as good as closed, for all users of the machine; Gloo does not notice.

    Args:
        said: What was told, with addresses in it as the system writes them.
    """
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not link.is_socket():
                continue
            duplicate = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=os.dup(int(link.name)))
        except OSError:  # another thread has closed it
            continue
        with duplicate:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) != socket.AF_INET:
                continue
            if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            host, port = duplicate.getsockname()
            address = struct.pack("!H", port) + socket.inet_aton(host)
            if any(address in words for words in said):
                _take_no_packet(duplicate)


def _take_no_packet(listening: socket.socket) -> None:
    instruction = ctypes.create_string_buffer(_FILTER_INSTRUCTION.pack(_RETURN, 0, 0, 0))
    program = _FILTER_PROGRAM.pack(1, ctypes.addressof(instruction))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
