"""One replica as the driver sees it: a process, the line to it, and what it says when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from evenly.team.memory import Block
from evenly.team.wire import Channel, channel_memory, channel_sockets, spin_seconds

if TYPE_CHECKING:
    import torch

_LAST_WORDS_BYTES = 1 << 16
_SCRIPT = os.path.join(os.path.dirname(__file__), "start_replica.py")  # noqa: PTH118, PTH120


class Process:
    """A replica, started.

    Args:
        index: Its number.
        count: How many replicas there are, the driver included.
        device: Its device.

    Raises:
        OSError: The interpreter cannot be run, or there is no room for another process.
    """

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            ours, theirs = channel_sockets()
            on_failure.callback(ours.close)
            always.callback(theirs.close)
            memory = channel_memory()
            always.callback(os.close, memory)
            settings = _settings()
            always.callback(os.close, settings)
            self._last_words = Block.allocate(_LAST_WORDS_BYTES)
            inherited = (settings, theirs.fileno(), memory, self._last_words.descriptor)
            numbers = [str(number) for number in (*inherited, index, count, os.getpid())]
            self._popen = _popen([*_interpreter(), _SCRIPT, *numbers], inherited)
            self.pid = self._popen.pid
            self.channel = Channel(ours, memory, driver=True, spin=spin_seconds(count))
            on_failure.pop_all()

    def death(self) -> int | None:
        """Its exit code (negative: the signal) once it has ended."""
        return self._popen.poll()

    def await_death(self, seconds: float) -> int:
        """Its exit code. It is killed if it does not end by itself within ``seconds``."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()

    def words(self) -> str:
        """What it wrote in its last moments."""
        return os.pread(self._last_words.descriptor, _LAST_WORDS_BYTES, 0).rstrip(b"\0").decode(errors="replace")

    def interrupt(self, token: int) -> None:
        """Have it give up what it is doing, wherever Python code can be interrupted."""
        self.channel.interrupt(token)
        self._popen.send_signal(signal.SIGINT)

    def order_end(self) -> None:
        """Close the line, which it takes as the order to end."""
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def end(self, deadline: float) -> None:
        """See it end: by itself until ``deadline`` (of the monotonic clock), then killed."""
        self.channel.close()
        self.await_death(max(0.0, deadline - time.monotonic()))
        self._last_words.close()

    def disown(self) -> None:
        """In a forked child of the driver: have nothing to do with it, and hold nothing open."""
        self._popen.returncode = 0  # or its finalizer would complain about a child that still runs
        self.channel.close()
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


def _popen(command: list[str], inherited: tuple[int, ...]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
            # Ctrl-C in the terminal is for the driver alone.
            start_new_session=True,
        )
    except OSError as error:
        message = f"cannot start a replica with the interpreter {command[0]!r} (sys.executable): {error.strerror}"
        raise type(error)(error.errno, message) from error


def _interpreter() -> list[str]:
    """The command of this interpreter with the flags that it runs with."""
    if not sys.executable:
        message = (
            "sys.executable is empty, as in some programs that embed Python: set it to the path of a Python "
            "interpreter that can import torch, for replicas to be started with"
        )
        raise RuntimeError(message)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags]


def _settings() -> int:
    """A descriptor of what a replica takes over before it imports anything: the import path and the arguments."""
    path = [_absolute(str(entry)) for entry in sys.path]
    descriptor = os.memfd_create("evenly-settings", os.MFD_CLOEXEC)
    os.write(descriptor, json.dumps([path, sys.argv]).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _absolute(entry: str) -> str:
    """A folder of the import path by its full name; what only an import hook understands stays as it is."""
    return os.path.abspath(entry) if os.path.exists(entry or os.curdir) else entry  # noqa: PTH100, PTH110
