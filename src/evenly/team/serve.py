"""From the start of a replica's process to its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys
from typing import Any

import torch

from evenly.team.context import threads_per_replica
from evenly.team.presence import become_replica
from evenly.team.protocol import Status, encode
from evenly.team.replica import Replica
from evenly.team.wire import Channel, ChannelClosedError, spin_seconds


def main(sock: int, memory: int, last_words: int, index: int, count: int) -> None:
    """Be replica ``index`` of ``count`` until the driver closes its end of the line."""
    become_replica(index)
    faulthandler.enable(last_words)
    channel = Channel(socket.socket(fileno=sock), memory, driver=False, spin=spin_seconds(count))
    os.close(memory)
    replica = Replica(channel, index, count)
    # Ctrl-C in the terminal does not get here (see the driver's side); the driver sends it on when it makes sense.
    signal.signal(signal.SIGINT, replica.give_up_if_unwanted)
    # What the user's code prints shall appear at once, and whatever happens to this process.
    stdout: Any = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(line_buffering=True)
    torch.set_grad_enabled(False)
    _keep_freed_memory()
    # Until a call says otherwise: more threads than cores would only wait for each other.
    torch.set_num_threads(threads_per_replica(count))
    channel.send(encode((int(Status.DONE), os.getpid())))
    with contextlib.suppress(ChannelClosedError):
        replica.loop()
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()
    # Not a normal exit: whatever the user's modules registered with atexit belongs to the driver's process.
    os._exit(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_ALL = (1 << 31) - 1


def _keep_freed_memory() -> None:
    """Have malloc use again what was freed, instead of asking the system for it, page by page, in every step.

    A large gradient goes as soon as it is in shared memory, and the next one takes its place: without this, page
    faults cost a step of a wide model a tenth of its time. The driver's memory is the user's, and left alone.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _ALL)
        mallopt(_M_TRIM_THRESHOLD, _ALL)
