"""The driver's side of the replicas: start them, send, collect, notice their death, stop them.

One team serves one list of devices; models on the same devices share it. Its processes start together, in the
background, when the first model asks for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from evenly.team import errors, groups
from evenly.team.exchange import Exchange, exchange_bytes
from evenly.team.group import Group
from evenly.team.memory import Block
from evenly.team.process import START_SECONDS, Process, stop_all
from evenly.team.protocol import Command, Status, decode, encode
from evenly.team.tracebacks import Places
from evenly.team.unneeded import NothingHalfDone, Unneeded
from evenly.team.weak import weakly
from evenly.team.wire import Channel, ChannelClosedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evenly.team.collectives import Kind

STOP_SECONDS = 0.5
"""How long a replica may take to end when told to. One that is busy has nothing to save."""
RECOVER_SECONDS = 2
"""How long replicas may take to give up an interrupted step; starting new ones takes about as long."""


class TookTooLongError(Exception):
    """A wait has exceeded its bound."""


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
        self._processes: list[Process] = []
        self._ready = False
        self._give_up_at: float | None = None
        self.definitions: dict[Hashable, int] = {}
        """Operations that the replicas know by number."""
        self._pending: dict[int, int] = {}
        """Answers that may be outstanding, per replica: never too few."""
        self._unneeded = Unneeded()
        self.groups: dict[Kind, Group] = {}
        """Those that have been needed."""
        self.exchange: Exchange | None = None
        """Where the driver adds up numbers with the other replicas in the middle of a forward."""
        self.phase = "starting"
        """What the replicas are doing, for messages about failures."""
        self.watch = weakly(self.check_alive)
        """To be called now and then while waiting."""
        self.places = Places()
        """Where the user's program asked for what was sent last, by number."""

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
        self.check_owner()
        self.generation += 1
        self._ready = False
        self._pending.clear()
        self.definitions.clear()
        self._unneeded.clear()
        try:
            for index, device in enumerate(self.devices[1:], 1):
                self._processes.append(Process(index, self.size, device))
        except BaseException:
            self.stop()
            raise
        for process in self._processes:
            process.channel.watch = self.watch
            for other in self._processes:
                if other is not process:
                    process.channel.also_watch(other.channel.socket.fileno())

    def check_owner(self) -> None:
        """Complain if this process is a forked child of the driver."""
        if os.getpid() != self._owner:
            message = (
                f"the replicas belong to process {self._owner}, and this is its forked child {os.getpid()} "
                "(a worker of a DataLoader, perhaps): use the bare module here, or wrap one in this process"
            )
            raise RuntimeError(message)

    def ensure_ready(self) -> None:
        """Have all processes running and in a known state; replace them where that cannot be had otherwise."""
        self.check_owner()
        self.phase = "starting" if self._processes and not self._ready else "idle"
        self.check_alive()
        if self._processes and (any(self._pending.values()) or self._broken()):
            self._recover()
        self.start()
        if not self._ready:
            self._await_start()

    def _await_start(self) -> None:
        self.phase = "starting"
        with self.within(START_SECONDS):
            for process in self._processes:
                self._await_hello(process)
        self._share_exchange()
        self._ready = True

    def _await_hello(self, process: Process) -> None:
        if not process.channel.untouched:  # an earlier wait was interrupted
            return
        try:
            process.channel.receive()
        except ChannelClosedError:
            raise self._lost(process) from None
        except TookTooLongError:
            process.give_up_start()
            self.stop()
            message = f"replica {process.index} ({process.device}) did not start within {START_SECONDS} s"
            raise TimeoutError(message) from None

    def _share_exchange(self) -> None:
        """Give all replicas the memory in which they add up numbers among themselves."""
        block = Block.allocate(exchange_bytes(self.size))
        self.exchange = Exchange(block.descriptor, self.size, 0, self.watch)
        token = self.reserve(1)
        for process in self._processes:
            self.send_descriptors(process.index, token, (block.descriptor,))
        self.broadcast(self.size, int(Command.EXCHANGE), token, self.size)
        block.close()

    def spoil(self) -> None:
        """Have the replicas replaced before they are used again: they are in the middle of something."""
        for process in self._processes:
            process.channel.broken = True

    def _broken(self) -> bool:
        return any(process.channel.broken for process in self._processes)

    def _recover(self) -> None:
        """After an interruption: pass over answers that nobody waited for, or stop all where that cannot be.

        A replica that is still busy with what was interrupted is asked to give it up. It then repeats a token, and
        all that comes before this is of no interest.
        """
        if not self._ready or self._broken():
            self.stop()
            return
        token = self.reserve(1)
        behind = [process for process in self._processes if self._pending.get(process.index)]
        try:
            with self.within(RECOVER_SECONDS):
                for process in behind:
                    process.interrupt(token)
                    process.channel.send(encode((int(Command.SYNC), token)))
                for process in behind:
                    while decode(process.channel.receive()) != (Status.DONE, token):
                        pass
                    self._pending[process.index] = 0
        except (ChannelClosedError, TookTooLongError):
            self.stop()

    def _settle(self) -> None:
        """Recover when replicas are needed that hold something: if they have to be replaced, that is lost."""
        self._recover()
        if not self._processes:
            message = (
                "an interrupted step left the replicas in a state in which they had to be stopped, and what they held "
                "is gone: run the forward again"
            )
            raise RuntimeError(message)

    def stop(self) -> None:
        """End all processes. A later call starts new ones."""
        self.exchange = None
        self._ready = False
        try:
            stop_all(self._processes, self._owner, STOP_SECONDS)
        finally:
            # Last: a group waits for what it is in the middle of, and that fails once the others are gone.
            self.groups.clear()

    def disown(self) -> None:
        """In a forked child: forget the replicas, which go on working for the parent."""
        self.lock = threading.RLock()  # another thread of the parent may have held it
        for process in self._processes:
            process.disown()
        self._processes.clear()
        groups.disown(self.groups)

    @property
    def started(self) -> bool:
        """Whether there are processes."""
        return bool(self._processes)

    def pids(self) -> list[int]:
        """Process ids of the replicas 1..n-1 that have been started."""
        return [process.pid for process in self._processes]

    def check_alive(self) -> None:
        """Raise if a replica has ended, or if what is waited for takes too long."""
        for process in self._processes:
            code = process.death()
            if code is not None:
                raise self._died(process, code)
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            raise TookTooLongError

    @contextlib.contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Let waits raise :class:`TookTooLongError` after so long."""
        self._give_up_at = time.monotonic() + seconds
        try:
            yield
        finally:
            self._give_up_at = None

    def _died(self, process: Process, code: int) -> errors.ReplicaDied:
        words, device = process.words(), str(process.device)
        self.stop()  # the others wait for something that will not come
        message = errors.death_message(
            process.index, device, pid=process.pid, returncode=code, phase=self.phase, last_words=words
        )
        return errors.ReplicaDied(message, process.index, device, self.phase, process.pid, code)

    def _lost(self, process: Process) -> errors.ReplicaDied:
        """The channel is closed: the process is dead, or about to be."""
        return self._died(process, process.await_death(STOP_SECONDS))

    # ------------------------------------------------------------------ talk

    def send(self, replica: int, header: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Send a command that does not answer to one replica."""
        process = self._process(replica)
        if process.channel.broken:
            self._settle()
        try:
            process.channel.send(header, tensors)
        except ChannelClosedError:
            raise self._lost(process) from None

    def ask(self, replica: int, header: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Send a command that answers; :meth:`answer` must follow for the same replica."""
        if self._pending.get(replica):
            self._settle()
        self._pending[replica] = 1
        self.send(replica, header, tensors)

    def send_descriptors(self, replica: int, token: int, descriptors: Sequence[int]) -> None:
        """Hand a replica file descriptors, before the command that makes use of them by ``token``."""
        process = self._process(replica)
        try:
            process.channel.send_descriptors(token, descriptors)
        except ChannelClosedError:
            raise self._lost(process) from None

    def _process(self, replica: int) -> Process:
        if not self._processes:
            self.check_owner()
            message = (
                "the replicas have been stopped or have died, and what they held is gone: run the forward again "
                "(the next call of the model starts new ones)"
            )
            raise RuntimeError(message)
        return self._processes[replica - 1]

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
        process = self._process(replica)
        try:
            header = process.channel.receive()
        except ChannelClosedError:
            raise self._lost(process) from None
        self._pending[replica] = 0
        status, *values = decode(header)
        if status == Status.FAILED:
            failure, operation, number = values
            return errors.restore(
                failure,
                replica=replica,
                device=str(process.device),
                phase=operation or self.phase,
                called_at=self.places.of(number),
            )
        return tuple(values)

    def receive_into(self, replica: int, tensor: Tensor) -> None:
        """Fill ``tensor`` (contiguous) with the next tensor of a replica's answer."""
        process = self._process(replica)
        try:
            process.channel.receive_into(tensor)
        except ChannelClosedError:
            raise self._lost(process) from None

    def channel(self, replica: int) -> Channel:
        """The line to a replica."""
        return self._process(replica).channel

    def collect(self, replicas: Sequence[int]) -> list[tuple[Any, ...]]:
        """Answers of several replicas, which bring no tensors. All are awaited before the first failure is raised."""
        answers = [self.answer(replica) for replica in replicas]
        failure = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        if failure is None:
            return [answer for answer in answers if not isinstance(answer, BaseException)]
        try:
            raise failure
        finally:
            del answers, failure  # see [Note: raised later]

    # ------------------------------------------------------------------ what the driver no longer needs

    def release(self, generation: int, *, value: int = 0, call: int = 0, model: int = 0) -> None:
        """Note that a value, a call's graph or a model is no longer needed: the replicas hear of it before long.

        Called by finalizers, from any thread, at any time.
        """
        if generation == self.generation:
            self._unneeded.note(value=value, call=call, model=model)

    def nothing_half_done(self, call: int, base: int, count: int) -> NothingHalfDone:
        """Around a call: if it fails, have the replicas forget its graph, and its ``count`` values from ``base`` on.

        Unlike :meth:`release`, this is for values of which the driver does not know whether they exist.
        """
        return NothingHalfDone(self, call, base, count)

    def abandon(self, generation: int, call: int, base: int, count: int) -> None:
        """Note that whatever is left of a call that failed is not needed."""
        if generation == self.generation:
            self._unneeded.note(call=call)
            self._unneeded.note_range(base, count)

    def many_released(self) -> bool:
        """Whether it is worth telling the replicas now; else they hear of it with the next call."""
        return self._unneeded.many

    def tell_released(self) -> None:
        """Put what :meth:`release` and :meth:`abandon` noted in front of what is sent next."""
        count, command = self._unneeded.command()
        for process in self._processes if count else ():
            if process.channel.broken:
                continue  # it will be replaced
            try:
                process.channel.hold(command)
            except ChannelClosedError:
                raise self._lost(process) from None
        self._unneeded.told(count)
