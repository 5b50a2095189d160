"""One forward over all replicas, and the backward that belongs to it, outside of the driver's autograd."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from evenly.batchwide import Shard, ThreadState, in_shard
from evenly.ends import resident
from evenly.explain import guesses_named, name_shard
from evenly.phases import phase
from evenly.reverse import NUMBERS_PER_CALL, RemoteGraph, Reverse, unless_failed
from evenly.sharded import ShardedTensor, plain
from evenly.team import answer as answers
from evenly.team.context import capture, random_state, shared_cores, threads_per_replica
from evenly.team.exchange import Exchange
from evenly.team.execution import INNER, LEAF, NO_GRADIENT, Graph, inner
from evenly.team.protocol import Command, can_travel, encode, receive_tensor, wire_form
from evenly.team.shipping import Parcel, pack, unpack

if TYPE_CHECKING:
    from evenly.batch import SplitPlan, TensorLeaf
    from evenly.divisors import Divisors
    from evenly.ends import End
    from evenly.joining import Join
    from evenly.replicated import Replicated
    from evenly.team.answer import Answer
    from evenly.team.team import Team


_ONE_TENSOR = answers.RemoteTensor(0)


@dataclass
class Work:
    """What the driver's own shard has cost so far."""

    rows: int = 0
    seconds: float = 0.0


class Call:
    """A forward of all replicas on their shards.

    Args:
        model: The module, synchronised with its replicas.
        plan: How the arguments are split.
        work: Where to account for the driver's part.
    """

    def __init__(self, model: Replicated, plan: SplitPlan, work: Work) -> None:
        self.model = model
        self.team: Team = model.team
        self.plan = plan
        self.work = work
        self.replicas = plan.replicas
        self.leaves = plan.tensor_leaves()
        # As they are now: the module may be sent again, with others, before the backward.
        self.model_leaves = model.leaves
        self.collectives = model.collectives
        self.shipment = model.shipment
        self.parameters: list[Tensor] = [model.leaves[position] for position in model.trainable]
        self.trainable = model.trainable
        self.first_ends: Sequence[End] = ()
        self.divisors: list[Divisors] = []
        self.given: list[tuple[Tensor | None, TensorLeaf]] = []
        self.written: set[int] = set()
        self.changed: set[int] = set()

    def shard(self, replica: int) -> Shard:
        """A replica's place in the batch."""
        rows = self.plan.rows
        return len(rows), rows[replica] / sum(rows), self.model.sync_batchnorm

    def peers(self) -> Exchange:
        """Where the driver adds up numbers with the other replicas in the middle of a forward or backward."""
        assert self.team.exchange is not None  # noqa: S101 - made when the replicas were started
        return self.team.exchange

    # ------------------------------------------------------------------ forward

    def forward(self, joiner: Callable[..., Join], graph: bool) -> tuple[Join, Reverse | None]:
        """Run all shards and join what they return.

        Args:
            joiner: Joins the driver's output and the others' answers, whose tensors are values from a number on;
                it is told what the driver's arguments were, and by what each forward divided.
            graph: Whether to keep graphs for a backward.

        Returns:
            The joined output, and the way back if there is one.
        """
        team = self.team
        call, base = team.reserve(1), team.reserve(NUMBERS_PER_CALL)
        before = ThreadState()
        try:
            with team.nothing_half_done(call, base, NUMBERS_PER_CALL):
                return self._run(joiner, call, base, graph=graph)
        except BaseException:  # see [Note: cut off] in batchwide.py
            before.restore_all()
            raise

    def _run(self, joiner: Callable[..., Join], call: int, base: int, *, graph: bool) -> tuple[Join, Reverse | None]:
        team = self.team
        wanted = [graph and leaf.value.requires_grad for leaf in self.leaves]
        team.phase = "forward"
        with phase("forward: publish parameters"):
            self.model.publish(training=graph)
        with phase("forward: send shards"):
            self._send(call, base, wanted, graph)
        own: BaseException | None = None
        output: Any = None
        inputs: dict[int, Tensor] = {}
        try:
            with phase("forward: own shard"):
                output, inputs = self._run_own(call, wanted, graph)
        except Exception as error:
            self.peers().refuse(call)  # or they wait for sums with a forward that may not even have begun
            name_shard(error, self.plan, 0, team.devices[0])
            own = error
        self.model.settle()  # while the replicas still compute
        with phase("forward: wait for replicas"):
            found = [self._answer(replica) for replica in range(1, self.replicas)]
        try:
            remote = unless_failed(own, found)
        finally:
            del own, found  # see [Note: raised later]
        for replica in range(1, self.replicas):
            self.model.buffers.confirm(replica)
        kept = RemoteGraph(team, call)
        with phase("forward: join"), guesses_named(self.plan):
            given, self.given = self.given, []
            join = joiner(output, remote, base, given, self.divisors)
        if graph:
            flags = [[tensor.requires_grad for tensor in answer.tensors] for answer in remote]
            self.first_ends = join.joints
            return join, Reverse(self, Graph(answers.tensors_of(output), inputs), kept, join.joints, flags)
        return join, None

    def _send(self, call: int, base: int, wanted: list[bool], graph: bool) -> None:
        team, plan, model = self.team, self.plan, self.model
        team.tell_released()
        # An autograd function's forward runs without grad mode, whatever the caller's is.
        context = (graph, *capture(team.size)[1:])
        states = (random_state(), model.generators.states())
        model.buffers.refresh()
        for replica in range(1, self.replicas):
            stand_ins: list[Tensor | None] = []
            what: dict[int, tuple[bool, Any, int, int]] = {}
            data: dict[int, Tensor] = {}
            for position, leaf in enumerate(self.leaves):
                handle = resident(self.team, self.plan, leaf)
                where = NO_GRADIENT if not wanted[position] else LEAF if leaf.value.is_leaf else INNER
                if handle is not None:
                    stand_in = _stand_in()
                    what[id(stand_in)] = (False, handle.check(), where, position)
                else:
                    tensor = plan.cut(leaf, replica)
                    if tensor is None or not can_travel(tensor):
                        stand_ins.append(tensor)
                        continue
                    stand_in = _stand_in()
                    spec, data[id(stand_in)] = wire_form(plain(tensor).detach())
                    what[id(stand_in)] = (True, spec, where, position)
                stand_ins.append(stand_in)
            parcel = self._parcel(replica, stand_ins)
            described: list[tuple[bool, Any, int, int]] = []
            buffer_specs, tensors = model.buffers.outgoing(replica)
            for tensor in parcel.tensors:
                if id(tensor) in what:
                    described.append(what[id(tensor)])
                    if id(tensor) in data:
                        tensors.append(data[id(tensor)])
                else:  # a part of something that travels in another way
                    spec, flat = wire_form(tensor)
                    described.append((True, spec, NO_GRADIENT, -1))
                    tensors.append(flat)
            header = (
                int(Command.CALL), model.number, call, base, plan.rows[replica], self.shard(replica), context, states,
                buffer_specs, parcel.payload, tuple(described),
            )  # fmt: skip
            team.ask(replica, encode(header), tensors)

    def _parcel(self, replica: int, stand_ins: list[Tensor | None]) -> Parcel:
        """A replica's arguments around tensors that stand for the real ones."""
        if self.plan.tensors_only:
            whole = [stand_in for stand_in in stand_ins if stand_in is not None and stand_in.numel() == 0]
            if len(whole) == len(stand_ins):
                return Parcel(_tensors_only(len(whole)), whole)
        return pack(self.plan.build(replica, stand_ins), name="(args, kwargs)")

    def _run_own(self, call: int, wanted: list[bool], graph: bool) -> tuple[Any, dict[int, Tensor]]:
        started = time.perf_counter()
        inputs: dict[int, Tensor] = {}
        tensors: list[Tensor | None] = []
        for position, leaf in enumerate(self.leaves):
            tensor = self.plan.cut(leaf, 0)
            if tensor is not None:
                tensor = plain(tensor).detach() if tensor.requires_grad or isinstance(tensor, ShardedTensor) else tensor
                if wanted[position]:
                    if not leaf.value.is_leaf and not isinstance(leaf.value, ShardedTensor):
                        tensor = tensor.data  # autograd counts a change of the user's tensor once more
                    inputs[position] = tensor.requires_grad_()
                    if not leaf.value.is_leaf:
                        tensor = inner(tensor)
            self.given.append((tensor, leaf))
            tensors.append(tensor)
        versions = [_version(tensor) for tensor, _ in self.given]
        args, kwargs = self.plan.build(0, tensors)
        threads = threads_per_replica(self.team.size)
        shard = in_shard(self.peers(), call, self.shard(0))
        with shared_cores(threads), torch.set_grad_enabled(graph), shard as divisors:
            output = self.model.module(*args, **kwargs)
        self.divisors.append(divisors)
        self._note_changes(versions, inputs)
        self.work.rows += self.plan.rows[0]
        self.work.seconds += time.perf_counter() - started
        return output, inputs

    def _answer(self, replica: int) -> Answer | BaseException:
        found = self.team.answer(replica)
        if isinstance(found, BaseException):
            name_shard(found, self.plan, replica, self.team.devices[replica])
            return found
        outline, metas, specs, changed, divisors = cast("tuple[bytes, Any, Any, Any, Divisors]", found)
        self.divisors.append(divisors)
        channel = self.team.channel(replica)
        tensors = [receive_tensor(channel, spec) for spec in specs]
        changes = [(position, receive_tensor(channel, spec)) for position, spec in changed]
        try:
            # No outline: one tensor, as most models return.
            answer = answers.read(unpack(outline, tensors) if outline else _ONE_TENSOR, metas)
            for position, tensor in changes:
                leaf = self.leaves[int(position)]
                # Unless it was a copy there, and not here: `contiguous()` copies rows of some layouts only.
                if leaf.item is not None or position in self.written:
                    self._follow_change(replica, leaf, tensor)
        except Exception as error:
            return error
        return answer

    def _note_changes(self, versions: list[int], inputs: dict[int, Tensor]) -> None:
        """Note which of the driver's arguments forward has changed in place."""
        for position, before in enumerate(versions):
            tensor, leaf = self.given[position]
            if tensor is None or _version(tensor) == before != -1:
                continue
            self.written.add(position)
            if position not in inputs or leaf.value.is_leaf:
                continue
            # To autograd the user's tensor becomes another one by that.
            if leaf.value._is_view():
                message = f"{leaf.path} was changed in place by forward, which cannot be followed: pass a copy of it"
                raise ValueError(message)
            if isinstance(leaf.value, ShardedTensor):
                leaf.value.written()
            self.changed.add(position)
            # What is returned of it has the gradient, and the user's tensor has not.
            self.given[position] = (tensor.detach(), leaf)

    def _follow_change(self, replica: int, leaf: TensorLeaf, value: Tensor) -> None:
        """Forward changed an argument in place: what it did to its rows elsewhere happens to the user's tensor."""
        target = self.plan.cut(leaf, replica)
        if leaf.dim is None and leaf.item is None and not leaf.copied:
            if target is None or not torch.equal(plain(target), value):
                message = (
                    f"{leaf.path} is given whole to each replica and was changed in place by forward, differently on "
                    f"replica {replica} than on replica 0: return what is to be known outside"
                )
                raise ValueError(message)
        elif (
            leaf.copied
            or isinstance(leaf.value, ShardedTensor)
            or target is None
            or not _is_view_of(target, leaf.value)
        ):
            message = f"{leaf.path} was changed in place by forward, which cannot be followed: pass a copy of it"
            raise ValueError(message)
        else:
            # Not a change of its own to autograd: what forward did to the driver's rows has been noted already.
            target.data.copy_(value)


def _version(tensor: Tensor | None) -> int:
    """How often a tensor has been written to; -1 where that is not counted."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _is_view_of(part: Tensor, whole: Tensor) -> bool:
    return part.layout is torch.strided and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@functools.cache
def _tensors_only(count: int) -> bytes:
    """The pickle of a call with ``count`` tensors by position, and nothing else."""
    nothing: dict[str, Any] = {}
    return pack((tuple(_stand_in() for _ in range(count)), nothing)).payload


def _stand_in() -> Tensor:
    """A tensor that stands for another in a pickle."""
    return torch.empty(0)
