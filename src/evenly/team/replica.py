"""The process of a replica: a loop over the driver's commands.

Commands are carried out in the order in which they come. Those that answer report their own failure; a failure of one
that does not is kept and given as the next answer, and operations that come in between are passed over.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import Tensor

from evenly.batchwide import PROBE_RUNS, Shard, ThreadState, in_shard, probed
from evenly.team import errors, protocol
from evenly.team.answer import RemoteTensor, apart, outline
from evenly.team.buffers import Buffers
from evenly.team.collectives import Kind
from evenly.team.context import Context, RandomState, applied, seed
from evenly.team.exchange import Exchange
from evenly.team.execution import INNER, NO_GRADIENT, Graph, backward, differentiate, inner
from evenly.team.generators import Generators, States, with_own_numbers
from evenly.team.holding import LeafSpec
from evenly.team.membership import Membership
from evenly.team.memory import Block
from evenly.team.model import Model
from evenly.team.presence import process_memory
from evenly.team.protocol import DTYPE_NUMBER, Command, Status, decode, encode, receive_tensor, wire_form, wire_forms
from evenly.team.shipping import LeafRegistry, Parcel, pack, unpack
from evenly.team.store import Store
from evenly.team.transports import TRANSPORTS
from evenly.team.wire import Channel, ChannelClosedError


class Replica:
    """The state of this process: models, values and graphs by the numbers that the driver gave them."""

    def __init__(self, channel: Channel, index: int, count: int) -> None:
        self.channel = channel
        self.index = index
        self.count = count
        self.models: dict[int, Model] = {}
        self.store = Store(channel)
        self.values = self.store.values
        self.graphs: dict[int, tuple[Model, Graph]] = {}
        self.context: Context | None = None
        self.exchange: Exchange | None = None
        self.membership = Membership(channel, index, count)
        self._in_users_code = False
        self._synced = 0
        self.rows = 0
        self.seconds = 0.0
        self._handlers: dict[int, Callable[..., Any]] = {
            Command.RELEASE: self.release,
            Command.SHIP: self.ship,
            Command.PATCH: self.patch,
            Command.PROBE: self.probe,
            Command.CALL: self.call,
            Command.BACKWARD: self.run_backward,
            Command.PUT: self.store.put,
            Command.DEFINE: self.store.define,
            Command.RUN: self.store.run,
            Command.FETCH: self.fetch,
            Command.RENAME: self.store.rename,
            Command.REPORT: self.report,
            Command.GROUP: self.membership.join,
            Command.BROADCAST: self.broadcast,
            Command.REDUCE: self.reduce,
            Command.SYNC: self.sync,
            Command.PARDON: self.store.pardon,
            Command.EXCHANGE: self.take_exchange,
        }
        self._answers = {
            Command.SHIP, Command.PATCH, Command.PROBE, Command.CALL, Command.BACKWARD, Command.FETCH, Command.REPORT,
            Command.SYNC,
        }  # fmt: skip

    def loop(self) -> None:
        """Carry out commands until told to stop."""
        before = ThreadState()
        while True:
            command, *arguments = decode(self.channel.receive())
            if command == Command.STOP:
                return
            answers = command in self._answers
            if self.store.failure is not None and answers and command != Command.SYNC:
                self._refuse(command, arguments)
                self._fail(*self.store.failure)
                self.store.failure = None
                continue
            try:
                self._handlers[command](*arguments)
            except ChannelClosedError:
                raise
            except BaseException as error:
                self._in_users_code = False
                before.restore_all()  # see [Note: cut off] in batchwide.py
                failure = errors.describe(error)
                # The traceback holds the frames, and they hold the tensors of the failed step.
                del error
                self._refuse(command, arguments)
                if answers:
                    self._fail(failure)
                elif self.store.failure is None:
                    self.store.failure = (failure, "", 0)

    def _reply(self, *values: object, tensors: list[Tensor] | None = None) -> None:
        self.channel.send(encode(cast("Any", (int(Status.DONE), *values))), tensors or ())

    def _refuse(self, command: int, arguments: list[Any]) -> None:
        """See to it that no other replica waits for this one in a forward or backward that it does not run."""
        if command == Command.CALL:
            self._peers().refuse(arguments[1])
        elif command == Command.BACKWARD:
            self._peers().refuse(arguments[3])

    def _fail(self, failure: bytes, operation: str = "", number: int = 0) -> None:
        self.channel.send(encode((int(Status.FAILED), failure, operation, number)))

    # ------------------------------------------------------------------ interruptions

    @contextlib.contextmanager
    def _interruptible(self) -> Generator[None]:
        """Around the user's code: only that may be cut off at any line, this process's own bookkeeping may not."""
        self._in_users_code = True
        try:
            self.give_up_if_unwanted()
            yield
        finally:
            self._in_users_code = False

    @contextlib.contextmanager
    def _running(self, number: int, shard: Shard, model: Model) -> Generator[None]:
        """Around a backward, the ``number``-th forward or backward of the user's code on its shard."""
        with model.holding.taking(), in_shard(self._peers(), number, shard), self._interruptible():
            yield

    def give_up_if_unwanted(self, *_: object) -> None:
        """Cut off the user's code if the driver has been interrupted meanwhile. A signal's handler, too."""
        if self._in_users_code and self.channel.interruption() > self._synced:
            raise KeyboardInterrupt

    def sync(self, token: int) -> None:
        """After an interruption: from here on answers are awaited again."""
        self._synced = token
        self.store.failure = None
        self._reply(token)

    # ------------------------------------------------------------------ models

    def ship(
        self,
        number: int,
        payload: bytes,
        specs: tuple[Any, ...],
        leaves: tuple[LeafSpec, ...],
        kind: Kind,
        sizes: tuple[int, ...],
    ) -> None:
        """Take over a module. Descriptors of the memory that the driver shares with this replica came before."""
        tensors = [receive_tensor(self.channel, spec) for spec in specs]
        descriptors = self.channel.claim_descriptors(number) if sizes else ()
        blocks = [Block(*pair) for pair in zip(descriptors, sizes, strict=True)]
        holding = TRANSPORTS[kind].replica(leaves, blocks)
        module = cast("torch.nn.Module", unpack(payload, tensors, holding.leaves))
        self.models[number] = Model(module, kind, holding, Buffers(module), Generators(module))
        self._reply()

    def broadcast(self, number: int, positions: tuple[int, ...]) -> None:
        """Receive parameters through the group."""
        with self.membership.together(self.models[number]) as (holding, group):
            holding.receive(group, positions)

    def reduce(self, number: int, wanted: bytes, bringing: tuple[int, ...]) -> None:
        """Bring gradients to the sum through the group, or zeros if this replica has none."""
        with self.membership.together(self.models[number]) as (holding, group):
            holding.reduce(group, wanted, bringing=self.index in bringing)

    def patch(self, number: int, changes: bytes, specs: tuple[Any, ...]) -> None:
        """Follow what changed on the driver's module since the last call."""
        tensors = [receive_tensor(self.channel, spec) for spec in specs]
        model = self.models[number]
        modules = list(model.module.modules())
        unpack(changes, tensors, model.leaves, modules).apply(modules, model.leaves)
        model.generators = Generators(model.module)
        self._reply()

    def take_exchange(self, token: int, replicas: int) -> None:
        """Take over the memory in which replicas add up numbers among themselves; its descriptor came before."""
        (descriptor,) = self.channel.claim_descriptors(token)
        self.exchange = Exchange(descriptor, replicas, self.index)
        os.close(descriptor)

    def _peers(self) -> Exchange:
        assert self.exchange is not None  # noqa: S101 - it is the first thing that the driver sends
        return self.exchange

    # ------------------------------------------------------------------ forward and backward

    def call(
        self,
        number: int,
        call: int,
        base: int,
        rows: int,
        shard: Shard,
        context: Context,
        states: tuple[RandomState, States],
        buffers: tuple[Any, ...],
        payload: bytes,
        arguments: tuple[Any, ...],
    ) -> None:
        """Run forward on this replica's shard. Output tensor i is kept as value ``base + i``."""
        started = time.perf_counter()
        model = self.models[number]
        model.buffers.receive(self.channel, buffers)
        inputs: dict[int, Tensor] = {}
        tensors: list[Tensor] = []
        watched: list[tuple[int, Tensor, int]] = []
        for inline, what, wanted, position in arguments:
            tensor = receive_tensor(self.channel, what) if inline else self.values[what].detach()
            if wanted != NO_GRADIENT:
                inputs[position] = tensor.requires_grad_()
            if wanted == INNER:
                tensor = inner(tensor)
            if inline and position >= 0:
                watched.append((position, tensor, tensor._version))
            tensors.append(tensor)
        seed(states[0], self.index)
        model.generators.seed(states[1], self.index)
        with applied(context, self.context), self._interruptible():
            self.context = context
            args, kwargs = with_own_numbers(unpack(payload, tensors, model.leaves), self.index)
            with in_shard(self._peers(), call, shard) as divisors:
                outputs = model.module(*args, **kwargs)
        outlined, found = outline(outputs)
        metas: list[tuple[int, tuple[int, ...], bool]] = []
        for position, (tensor, value) in enumerate(zip(found, apart(found), strict=True)):
            self.values[base + position] = value
            metas.append((DTYPE_NUMBER[tensor.dtype], tuple(tensor.shape), tensor.requires_grad))
        if any(tensor.requires_grad for tensor in found):
            self.graphs[call] = (model, Graph(found, inputs))
        # Most models return one tensor, whose outline is known.
        one = type(outlined) is RemoteTensor
        parcel = Parcel(b"") if one else pack(outlined, homeward=True, name="output")
        specs, data = wire_forms(parcel.tensors)
        self.rows += rows
        # Rows of an argument that forward changed in place go back to the user's tensor.
        changed = [(position, tensor) for position, tensor, version in watched if tensor._version != version]
        forms = [(position, *wire_form(tensor.detach())) for position, tensor in changed]
        self._reply(
            parcel.payload,
            tuple(metas),
            specs,
            tuple((position, spec) for position, spec, _ in forms),
            divisors,
            tensors=[*data, *(form for _, _, form in forms)],
        )
        self.seconds += time.perf_counter() - started

    def release(
        self,
        values: tuple[int, ...],
        calls: tuple[int, ...],
        models: tuple[int, ...],
        ranges: tuple[tuple[int, int], ...],
    ) -> None:
        """Forget what the driver has no more use for: values, graphs of calls, models, all values in a range."""
        self.store.free(values)
        for call in calls:
            self.graphs.pop(call, None)
        for number in models:
            self.models.pop(number, None)
        for base, count in ranges:
            self.store.abandon(base, count)

    def run_backward(
        self, call: int, keep: bool, again: int, base: int, shard: Shard, gradients: tuple[Any, ...]
    ) -> None:
        """Run a call's graph backwards: parameter gradients go to shared memory, those of inputs become values.

        With a number ``again`` that is not 0 the graph of the gradients is kept under it.
        """
        started = time.perf_counter()
        incoming: dict[int, Tensor] = {}
        for position, inline, what in gradients:
            gradient = receive_tensor(self.channel, what) if inline else self.values[what]
            incoming[position] = incoming[position] + gradient if position in incoming else gradient
        if not call:  # this replica has nothing to run, but must not be waited for
            with in_shard(self._peers(), base, shard):
                pass
            self._reply(b"", (), None, ())
            return
        model, graph = self.graphs[call]
        if not keep:
            del self.graphs[call]
        running = self._running(base, shard, model)
        if again:
            found, inputs, second = differentiate(graph, incoming, model.leaves, running)
            self.graphs[again] = (model, second)
        else:
            found, inputs = backward(graph, incoming, model.leaves, running, keep=keep)
        present, sparse = model.holding.lay(found)
        metas: list[tuple[int, int, tuple[int, ...]] | tuple[int]] = []
        for position, grad in inputs.items():
            if grad is None:
                metas.append((position,))
            else:
                self.values[base + position] = grad
                metas.append((position, DTYPE_NUMBER[grad.dtype], tuple(grad.shape)))
        other = pack(sparse) if sparse else None
        specs, data = wire_forms(other.tensors) if other else ((), [])
        self._reply(present, tuple(metas), other and other.payload, specs, tensors=data)
        self.seconds += time.perf_counter() - started

    def probe(
        self,
        number: int,
        context: Context,
        training: bool,
        dtype: int,
        sync_batchnorm: bool,
        rows: tuple[int, int],
        payload: bytes,
        specs: tuple[Any, ...],
    ) -> None:
        """Run a throw-away copy on the given inputs; answers with its outputs.

        With a ``dtype`` that is not negative it runs in that one instead of its own.

        The copy's parameters are private views of the same memory (copied page by page when written), so the probe
        needs no second copy of the model and cannot change it.
        """
        tensors = [receive_tensor(self.channel, spec) for spec in specs]
        model = self.models[number]
        leaves = model.holding.private_leaves()
        parcel = pack(model.module, leaves=LeafRegistry(model.leaves))
        copy = cast("torch.nn.Module", unpack(parcel.payload, [t.clone() for t in parcel.tensors], leaves))
        _set_mode(copy, training=training)
        if dtype >= 0:
            copy.to(protocol.DTYPES[dtype])
            tensors = [t.to(protocol.DTYPES[dtype]) if t.is_floating_point() else t for t in tensors]
        with applied(context, self.context), torch.no_grad(), _unheard(), self._interruptible():
            self.context = context
            # Each run has arguments of its own, for forward may change them, and numbers of its own: what is random
            # must not seem to be what rows do to each other.
            calls = (
                with_own_numbers(unpack(payload, [t.clone() for t in tensors], leaves)[run], run)
                for run in range(PROBE_RUNS)
            )
            outputs, divisors = probed(copy, calls, rows, sync_batchnorm=sync_batchnorm)
        answer = pack([*outputs, divisors], homeward=True)
        specs, data = wire_forms(answer.tensors)
        self._reply(answer.payload, specs, tensors=data)

    # ------------------------------------------------------------------ values

    def fetch(self, handles: tuple[int, ...]) -> None:
        """Answer with values."""
        specs, data = wire_forms([self.values[handle] for handle in handles])
        self._reply(specs, tensors=data)

    def report(self) -> None:
        """Answer with what this replica has done and what it holds."""
        held = (len(self.values), len(self.graphs), len(self.models))
        self._reply(self.rows, self.seconds, process_memory(), held)


def _set_mode(module: torch.nn.Module, *, training: bool) -> None:
    """Put a probe's copy into a mode, but without what is per replica, or random, by design."""
    module.train(training)
    for part in module.modules():
        if isinstance(part, (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)):
            part.eval()


@contextlib.contextmanager
def _unheard() -> Generator[None]:
    """Nobody shall hear of what is only tried: what it prints, what it warns of."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
