"""The driver's side of the replicas: start them, send, collect, notice their death, stop them.

One team serves one list of devices; models on the same devices share it. Its processes start together, in the
background, when the first model asks for them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from evenly.team import errors
from evenly.team.exchange import Exchange, exchange_bytes
from evenly.team.memory import Block
from evenly.team.protocol import Command, Status, decode, encode
from evenly.team.wire import Channel, ChannelClosedError, channel_memory, spin_seconds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

START_SECONDS = 120
"""How long a replica may take to start: it imports torch, on a busy machine perhaps from a cold disk."""
STOP_SECONDS = 2
_LAST_WORDS_BYTES = 1 << 16


class _Process:
    """One replica as the driver sees it."""

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = channel_memory()
        self.last_words = Block.allocate(_LAST_WORDS_BYTES)
        settings = os.memfd_create("evenly-settings", os.MFD_CLOEXEC)
        try:
            os.write(settings, json.dumps([os.path.abspath(path) for path in sys.path]).encode())  # noqa: PTH100
            os.lseek(settings, 0, os.SEEK_SET)
            inherited = (settings, theirs.fileno(), memory, self.last_words.descriptor)
            script = os.path.join(os.path.dirname(__file__), "start_replica.py")  # noqa: PTH118, PTH120
            numbers = [str(number) for number in (*inherited, index, count, os.getpid())]
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self.popen = subprocess.Popen(
                [sys.executable, *flags, script, *numbers],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                # Ctrl-C in the terminal is for the driver alone.
                start_new_session=True,
            )
            self.channel = Channel(ours, memory, driver=True, spin=spin_seconds(count))
        finally:
            theirs.close()
            os.close(memory)
            os.close(settings)

    def death(self) -> int | None:
        """Its exit code (negative: the signal) once it has ended."""
        return self.popen.poll()

    def words(self) -> str:
        """What it wrote in its last moments."""
        return os.pread(self.last_words.descriptor, _LAST_WORDS_BYTES, 0).rstrip(b"\0").decode(errors="replace")

    def stop(self, deadline: float) -> None:
        """See it end: by itself until ``deadline`` (of the monotonic clock), then killed."""
        self.channel.close()
        try:
            self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.last_words.close()


class Team:
    """The replicas 1..n-1 behind the driver, which is replica 0.

    Every method must be called with :attr:`lock` held; it may be taken again by the thread that holds it.

    Attributes:
        devices: One per replica, the driver's first.
        generation: Counts the times that the processes were started. What was sent to an earlier generation is gone.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.lock = threading.RLock()
        self.generation = 0
        self._number = 0
        self._owner = os.getpid()
        self._processes: list[_Process] = []
        self._ready = False
        self.definitions: dict[Hashable, int] = {}
        """Operations that the replicas know by number."""
        self._pending: dict[int, int] = {}
        self._released: list[int] = []
        self._dropped: list[int] = []
        self._forgotten: list[int] = []
        self.exchange: Exchange | None = None
        """Where the driver adds up numbers with the other replicas in the middle of a forward."""
        self.phase = "starting"
        """What the replicas are doing, for messages about failures."""

    @property
    def size(self) -> int:
        """Number of replicas, the driver included."""
        return len(self.devices)

    def reserve(self, count: int) -> int:
        """The first of ``count`` consecutive numbers that no value, call or model has had yet."""
        first = self._number + 1
        self._number += count
        return first

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the processes, all at once, and return without waiting for them."""
        if self._processes:
            return
        if os.getpid() != self._owner:
            message = "this model's replicas belong to another process: wrap the module again in this one"
            raise RuntimeError(message)
        self.generation += 1
        self._ready = False
        self._pending.clear()
        self.definitions.clear()
        self._released, self._dropped, self._forgotten = [], [], []
        try:
            for index, device in enumerate(self.devices[1:], 1):
                self._processes.append(_Process(index, self.size, device))
        except BaseException:
            self.stop()
            raise
        for process in self._processes:
            process.channel.watch = self._check_alive
            for other in self._processes:
                if other is not process:
                    process.channel.also_watch(other.channel.socket.fileno())

    def ensure_ready(self) -> None:
        """Have all processes running and in a known state; replace them where that cannot be had otherwise."""
        self.phase = "idle"
        self._check_alive()
        if self._processes and (any(self._pending.values()) or any(p.channel.broken for p in self._processes)):
            self._recover()
        self.start()
        if self._ready:
            return
        self.phase = "starting"
        deadline = time.monotonic() + START_SECONDS
        for process in self._processes:
            while not process.channel.ready():
                if time.monotonic() > deadline:
                    self.stop()
                    message = f"replica {process.index} ({process.device}) did not start within {START_SECONDS} s"
                    raise TimeoutError(message)
                self._check_alive()
                select.select([process.channel.socket], [], [], 0.1)
                process.channel.take_descriptors()
            process.channel.receive()
        self._share_exchange()
        self._ready = True

    def _share_exchange(self) -> None:
        """Give all replicas the memory in which they add up numbers among themselves."""
        block = Block.allocate(exchange_bytes(self.size))
        self.exchange = Exchange(block.descriptor, self.size, 0, self._check_alive)
        for process in self._processes:
            self.send_descriptor(process.index, block.descriptor)
        self.broadcast(self.size, int(Command.EXCHANGE), self.size)
        block.close()

    def _recover(self) -> None:
        """After an interruption: pass over replies that nobody waited for, or start afresh where that cannot be."""
        if not self._ready or any(process.channel.broken for process in self._processes):
            self.stop()
            return
        for process in self._processes:
            process.channel.skip()
            while self._pending.get(process.index, 0):
                self._read(process)
                process.channel.skip()

    def stop(self) -> None:
        """End all processes. A later call starts new ones."""
        self._ready = False
        _stop(self._processes, self._owner)

    def pids(self) -> list[int]:
        """Process ids of the replicas 1..n-1 that have been started."""
        return [process.popen.pid for process in self._processes]

    def _check_alive(self) -> None:
        for process in self._processes:
            code = process.death()
            if code is not None:
                raise self._died(process, code)

    def _died(self, process: _Process, code: int) -> errors.ReplicaDied:
        words, pid, device = process.words(), process.popen.pid, str(process.device)
        self.stop()  # the others wait for something that will not come
        message = errors.death_message(
            process.index, device, pid=pid, returncode=code, phase=self.phase, last_words=words
        )
        return errors.ReplicaDied(message, process.index, device, self.phase, pid, code)

    def _lost(self, process: _Process) -> errors.ReplicaDied:
        """The channel is closed: the process is dead, or about to be."""
        try:
            code = process.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            code = process.popen.wait()
        return self._died(process, code)

    # ------------------------------------------------------------------ talk

    def send(self, replica: int, header: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Send a command that does not answer to one replica."""
        process = self._processes[replica - 1]
        try:
            process.channel.send(header, tensors)
        except ChannelClosedError:
            raise self._lost(process) from None

    def ask(self, replica: int, header: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Send a command that answers; :meth:`answer` must follow for the same replica."""
        self._pending[replica] = self._pending.get(replica, 0) + 1
        self.send(replica, header, tensors)

    def send_descriptor(self, replica: int, descriptor: int) -> None:
        """Hand a replica a file descriptor, before the command that makes use of it."""
        process = self._processes[replica - 1]
        try:
            process.channel.send_descriptor(descriptor)
        except ChannelClosedError:
            raise self._lost(process) from None

    def broadcast(self, replicas: int, *command: Any) -> None:
        """Send one command that does not answer to replicas 1..``replicas``-1."""
        header = encode(command)
        for replica in range(1, replicas):
            self.send(replica, header)

    def answer(self, replica: int) -> tuple[Any, ...] | BaseException:
        """Wait for a replica's answer: its values, or the exception that it met. Tensors come next in its channel.

        Raises:
            ReplicaDied: A replica has ended; all are stopped then.
        """
        process = self._processes[replica - 1]
        try:
            status, *values = self._read(process)
        except ChannelClosedError:
            raise self._lost(process) from None
        if status == Status.FAILED:
            return errors.restore(values[0], replica=replica, device=str(process.device), phase=self.phase)
        return tuple(values)

    def receive_into(self, replica: int, tensor: Tensor) -> None:
        """Fill ``tensor`` (contiguous) with the next tensor of a replica's answer."""
        process = self._processes[replica - 1]
        try:
            process.channel.receive_into(tensor)
        except ChannelClosedError:
            raise self._lost(process) from None

    def channel(self, replica: int) -> Channel:
        """The line to a replica."""
        return self._processes[replica - 1].channel

    def collect(self, replicas: Sequence[int]) -> list[tuple[Any, ...]]:
        """Answers of several replicas, which bring no tensors. Every one is awaited before the first failure is raised."""
        answers = [self.answer(replica) for replica in replicas]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _read(self, process: _Process) -> tuple[Any, ...]:
        # From here on the answer is no longer outstanding: an interruption in the middle leaves bytes that skip() takes.
        header = process.channel.receive()
        self._pending[process.index] -= 1
        return decode(header)

    # ------------------------------------------------------------------ what the driver no longer needs

    def release(self, generation: int, *, value: int = 0, call: int = 0, model: int = 0) -> None:
        """Note that a value, a call's graph or a model is no longer needed; the replicas hear of it with the next command.

        Called by finalizers, from any thread, at any time: it only appends to a list.
        """
        if generation != self.generation:
            return
        if value:
            self._released.append(value)
        if call:
            self._dropped.append(call)
        if model:
            self._forgotten.append(model)

    def tell_released(self) -> None:
        """Send what :meth:`release` noted."""
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            self.broadcast(self.size, int(Command.DROP), tuple(dropped))
        if self._released:
            released, self._released = self._released, []
            self.broadcast(self.size, int(Command.FREE), tuple(released))
        if self._forgotten:
            forgotten, self._forgotten = self._forgotten, []
            for model in forgotten:
                self.broadcast(self.size, int(Command.FORGET), model)


_teams: weakref.WeakValueDictionary[tuple[torch.device, ...], Team] = weakref.WeakValueDictionary()
_teams_lock = threading.Lock()


def team_for(devices: Sequence[torch.device]) -> Team:
    """The team of these devices: the one that other models use already, or a new one (not started yet)."""
    key = tuple(devices)
    with _teams_lock:
        team = _teams.get(key)
        if team is None:
            team = _teams[key] = Team(key)
            weakref.finalize(team, _stop, team._processes, os.getpid()).atexit = False  # pyright: ignore[reportPrivateUsage]
        return team


def _stop(processes: list[_Process], owner: int) -> None:
    """End ``processes`` and forget them; in a forked child of their owner only forget them."""
    ending = processes[:]
    processes.clear()
    if os.getpid() != owner:
        return
    for process in ending:
        with contextlib.suppress(OSError):
            process.channel.socket.shutdown(socket.SHUT_RDWR)  # which they take as the order to end
    deadline = time.monotonic() + STOP_SECONDS
    for process in ending:
        process.stop(deadline)


@atexit.register
def shutdown() -> None:
    """Stop the replicas of all teams. A model that is called afterwards starts new ones."""
    for team in list(_teams.values()):
        # A thread that is stuck in a call must not keep the interpreter from ending.
        held = team.lock.acquire(timeout=STOP_SECONDS)
        try:
            team.stop()
        finally:
            if held:
                team.lock.release()


def _after_fork() -> None:
    """In a forked child (a DataLoader's worker): the replicas belong to the parent; forget them without a word."""
    _teams.clear()


os.register_at_fork(after_in_child=_after_fork)
