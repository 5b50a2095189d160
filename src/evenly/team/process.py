"""One replica as the driver sees it: a process, the line to it, and what it says when it dies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from evenly.team.memory import Block
from evenly.team.nursery import NEWS, order_replica
from evenly.team.wire import Channel, channel_memory, channel_sockets, spin_seconds

if TYPE_CHECKING:
    import torch

_LAST_WORDS_BYTES = 1 << 16
START_SECONDS = 120
"""How long a replica may take to start: a new nursery imports torch, on a busy machine perhaps from a cold disk."""
_KILL_SECONDS = 5
"""How long one that was killed may take to end; it may still have memory to give back."""


class Process:
    """A replica, started.

    Args:
        index: Its number.
        count: How many replicas there are, the driver included.
        device: Its device.

    Raises:
        OSError: The interpreter cannot be run, or there is no room for another process.
        RuntimeError: The interpreter does not do what it should.
    """

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        self._pid = 0
        self._code: int | None = None
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            ours, theirs = channel_sockets()
            on_failure.callback(ours.close)
            always.callback(theirs.close)
            # What becomes of it is told here; to close this end means its end.
            self._life, told = channel_sockets()
            on_failure.callback(self._life.close)
            self._heard = select.poll()
            self._heard.register(self._life, select.POLLIN)
            always.callback(told.close)
            memory = channel_memory()
            always.callback(os.close, memory)
            self._last_words = Block.allocate(_LAST_WORDS_BYTES)
            handed = (told.fileno(), theirs.fileno(), memory, self._last_words.descriptor)
            # Held, because the replica lives no longer than it.
            self._nursery = order_replica(index, count, handed)
            self.channel = Channel(ours, memory, driver=True, spin=spin_seconds(count))
            on_failure.pop_all()

    @property
    def pid(self) -> int:
        """Its process id, waited for while it is started; 0 if it came to no process."""
        self._hear_until(lambda: self._pid > 0, START_SECONDS)
        return self._pid

    def death(self) -> int | None:
        """Its exit code (negative: the signal) once it has ended."""
        self._hear_until(lambda: False, 0)
        return self._code

    def await_death(self, seconds: float) -> int:
        """Its exit code. It is killed if it does not end by itself within ``seconds``."""
        if self.death() is None and self._pid:  # one that has not begun yet never will
            self._hear_until(lambda: False, seconds)
            self._signal(signal.SIGKILL)
            self._hear_until(lambda: False, _KILL_SECONDS)
        return -signal.SIGKILL if self._code is None else self._code

    def _hear_until(self, enough: Callable[[], bool], seconds: float) -> None:
        """Take in what is told of it until that is ``enough``, or its end, but no longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._code is None and not enough():
            if not self._heard.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return
            try:
                news = self._life.recv(NEWS.size)
            except OSError:
                news = b""
            if news:
                self._pid, ended, code = NEWS.unpack(news)
                self._code = code if ended else None
            else:  # the nursery is gone, and takes all along
                self._code = -signal.SIGKILL

    def _signal(self, number: int) -> None:
        # The nursery does not bury it before this object lets go: the number can mean nobody else.
        if self.death() is None and self._pid:
            os.kill(self._pid, number)

    def words(self) -> str:
        """What it wrote in its last moments."""
        return os.pread(self._last_words.descriptor, _LAST_WORDS_BYTES, 0).rstrip(b"\0").decode(errors="replace")

    def interrupt(self, token: int) -> None:
        """Have it give up what it is doing, wherever Python code can be interrupted."""
        self.channel.interrupt(token)
        self._signal(signal.SIGINT)

    def give_up_start(self) -> None:
        """It does not start, so what it should come from does not work: end that, and all that came from it."""
        self._nursery.kill()

    def order_end(self) -> None:
        """Close the line, which it takes as the order to end."""
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def end(self, deadline: float) -> None:
        """See it end: by itself until ``deadline`` (of the monotonic clock), then killed."""
        self.channel.close()
        self.await_death(max(0.0, deadline - time.monotonic()))
        self._life.close()
        self._last_words.close()

    def disown(self) -> None:
        """In a forked child of the driver: have nothing to do with it, and hold nothing open."""
        self.channel.close()
        self._life.close()
        self._last_words.close()


def stop_all(processes: list[Process], owner: int, seconds: float) -> None:
    """End ``processes`` and forget them; in a forked child of their ``owner`` only forget them.

    Args:
        processes: Emptied.
        owner: Process id of the driver.
        seconds: How long they may take.
    """
    ending = processes[:]
    processes.clear()
    if os.getpid() != owner:
        return
    for process in ending:
        process.order_end()
    deadline = time.monotonic() + seconds
    try:
        for process in ending:
            process.end(deadline)
    except BaseException:  # Ctrl-C: no patience, but nothing stays behind
        for process in ending:
            process.end(deadline=0)
        raise
