"""One forward over all replicas, and the backward that belongs to it, outside of the driver's autograd."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from evenly.sharded import ShardedTensor, plain
from evenly.team import answer as answers
from evenly.team.context import capture, random_state, shared_cores, threads_per_replica
from evenly.team.exchange import Exchange, ExchangeError
from evenly.team.execution import Graph, backward
from evenly.team.protocol import Command, can_travel, encode, receive_tensor, wire_form
from evenly.team.shipping import pack, unpack
from evenly.team.values import Handle, fetch_from
from evenly.whole_batch import Shard, in_backward, in_shard

if TYPE_CHECKING:
    from evenly.batch import SplitPlan, TensorLeaf
    from evenly.joining import Join
    from evenly.replicated import Replicated
    from evenly.team.answer import Answer
    from evenly.team.team import Team

_SPARSE = 2
_NUMBERS_PER_CALL = 1 << 16
"""Values that one call may make, counted by position; numbers cost nothing."""


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
        self.parameters: list[Tensor] = [model.leaves[position] for position in model.trainable]
        self._trainable = model.trainable
        self._graph: Graph | None = None
        self._remote: RemoteGraph | None = None
        self._join: Join | None = None

    def wants_gradient(self, leaf: TensorLeaf) -> bool:
        """Whether the user wants a gradient of this input."""
        return torch.is_grad_enabled() and leaf.value.requires_grad

    def _shard(self, replica: int) -> Shard:
        """A replica's place in the batch."""
        rows = self.plan.rows
        return len(rows), rows[replica] / sum(rows), self.model.sync_batchnorm

    def _peers(self) -> Exchange:
        """Where the driver adds up numbers with the other replicas in the middle of a forward or backward."""
        assert self.team.exchange is not None  # noqa: S101 - made when the replicas were started
        return self.team.exchange

    # ------------------------------------------------------------------ forward

    def forward(self, joiner: Callable[[Any, Sequence[Answer], int], Join], graph: bool) -> Join:
        """Run all shards and join what they return.

        Args:
            joiner: Joins the driver's output and the others' answers, whose tensors are values from a number on.
            graph: Whether to keep graphs for a backward.
        """
        team = self.team
        call, base = team.reserve(1), team.reserve(_NUMBERS_PER_CALL)
        with team.nothing_half_done(call, base, _NUMBERS_PER_CALL):
            return self._run(joiner, call, base, graph=graph)

    def _run(self, joiner: Callable[[Any, Sequence[Answer], int], Join], call: int, base: int, *, graph: bool) -> Join:
        team = self.team
        wanted = [graph and leaf.value.requires_grad for leaf in self.leaves]
        team.phase = "forward"
        with record_function("evenly.forward: publish parameters"):
            self.model.publish(training=graph)
        with record_function("evenly.forward: send shards"):
            self._send(call, base, wanted, graph)
        own: BaseException | None = None
        output: Any = None
        try:
            with record_function("evenly.forward: own shard"):
                output, inputs = self._run_own(call, wanted, graph)
        except Exception as error:  # noqa: BLE001 - raised again below, when the replicas are done
            self._peers().refuse(call)  # or they wait for sums with a forward that may not even have begun
            own = error
        with record_function("evenly.forward: wait for replicas"):
            found = [self._answer(replica) for replica in range(1, self.replicas)]
        try:
            remote = _unless_failed(own, found)
        finally:
            del own, found  # see [Note: raised later]
        self._remote = RemoteGraph(team, call)
        with record_function("evenly.forward: join"):
            self._join = joiner(output, remote, base)
        tensors = answers.tensors_of(output)
        self._graph = Graph(tensors, inputs) if graph else None
        self._differentiable = [[tensor.requires_grad for tensor in answer.tensors] for answer in remote]
        return self._join

    def _send(self, call: int, base: int, wanted: list[bool], graph: bool) -> None:
        team, plan, model = self.team, self.plan, self.model
        team.tell_released()
        # An autograd function's forward runs without grad mode, whatever the caller's is.
        context = (graph, *capture(team.size)[1:])
        state = random_state()
        model.buffers.refresh()
        for replica in range(1, self.replicas):
            stand_ins: list[Tensor | None] = []
            what: dict[int, tuple[bool, Any, int, int]] = {}
            data: dict[int, Tensor] = {}
            for position, leaf in enumerate(self.leaves):
                handle = self._resident(leaf)
                where = position if wanted[position] else -1
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
            parcel = pack(plan.build(replica, stand_ins), name="(args, kwargs)")
            described: list[tuple[bool, Any, int, int]] = []
            buffer_specs, tensors = model.buffers.outgoing(replica)
            for tensor in parcel.tensors:
                if id(tensor) in what:
                    described.append(what[id(tensor)])
                    if id(tensor) in data:
                        tensors.append(data[id(tensor)])
                else:  # a part of something that travels in another way
                    spec, flat = wire_form(tensor)
                    described.append((True, spec, -1, -1))
                    tensors.append(flat)
            header = (
                int(Command.CALL), model.number, call, base, plan.rows[replica], self._shard(replica), context, state,
                buffer_specs, parcel.payload, tuple(described),
            )  # fmt: skip
            team.ask(replica, encode(header), tensors)
        model.buffers.confirm()

    def _resident(self, leaf: TensorLeaf) -> Handle | None:
        """The handle of an input whose rows are in the replicas already, as they are to be split."""
        value = leaf.value
        if not isinstance(value, ShardedTensor) or leaf.dim is None or leaf.item is not None:
            return None
        shards = value.shards
        fits = shards is not None and shards.team is self.team and shards.dim == leaf.dim
        return shards.handle if shards is not None and fits and shards.rows == self.plan.rows else None

    def _run_own(self, call: int, wanted: list[bool], graph: bool) -> tuple[Any, dict[int, Tensor]]:
        started = time.perf_counter()
        inputs: dict[int, Tensor] = {}
        tensors: list[Tensor | None] = []
        for position, leaf in enumerate(self.leaves):
            tensor = self.plan.cut(leaf, 0)
            if tensor is not None:
                tensor = plain(tensor).detach() if tensor.requires_grad or isinstance(tensor, ShardedTensor) else tensor
                if wanted[position]:
                    inputs[position] = tensor.requires_grad_()
            tensors.append(tensor)
        args, kwargs = self.plan.build(0, tensors)
        threads = threads_per_replica(self.team.size)
        with shared_cores(threads), torch.set_grad_enabled(graph), in_shard(self._peers(), call, self._shard(0)):
            output = self.model.module(*args, **kwargs)
        self.work.rows += self.plan.rows[0]
        self.work.seconds += time.perf_counter() - started
        return output, inputs

    def _answer(self, replica: int) -> Answer | BaseException:
        found = self.team.answer(replica)
        if isinstance(found, BaseException):
            return found
        outline, metas, specs, changed = found
        channel = self.team.channel(replica)
        tensors = [receive_tensor(channel, spec) for spec in specs]
        changes = [(position, receive_tensor(channel, spec)) for position, spec in changed]
        try:
            answer = answers.read(unpack(outline, tensors), metas)
            for position, tensor in changes:
                self._follow_change(replica, self.leaves[position], tensor)
        except Exception as error:  # noqa: BLE001 - raised by the caller, when all replicas have answered
            return error
        return answer

    def _follow_change(self, replica: int, leaf: TensorLeaf, value: Tensor) -> None:
        """Forward changed an argument in place: what it did to its rows elsewhere happens to the user's tensor."""
        target = self.plan.cut(leaf, replica)
        if leaf.dim is None and leaf.item is None:
            if target is None or not torch.equal(plain(target), value):
                message = (
                    f"{leaf.path} is given whole to each replica and was changed in place by forward, differently on "
                    f"replica {replica} than on replica 0: return what is to be known outside"
                )
                raise ValueError(message)
        elif isinstance(leaf.value, ShardedTensor) or target is None or not _is_view_of(target, leaf.value):
            message = f"{leaf.path} was changed in place by forward, which cannot be followed: pass a copy of it"
            raise ValueError(message)
        else:
            target.detach().copy_(value)

    # ------------------------------------------------------------------ backward

    def backward(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[int], *, keep: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run all replicas' graphs backwards and add up.

        Args:
            gradients: One per joint of the output; None where nothing flows.
            inputs: Positions of the inputs whose gradient is wanted.
            keep: Whether the graphs are needed again.

        Returns:
            Gradients of :attr:`parameters`, and of the inputs.
        """
        graph, remote, join = self._graph, self._remote, self._join
        if graph is None or remote is None or join is None:
            message = (
                "Trying to backward through the graph a second time: the graphs in the replicas have been freed. "
                "Specify retain_graph=True if you need to backward through them again."
            )
            raise RuntimeError(message)
        team = self.team
        remote.check()
        team.phase = "backward"
        base = team.reserve(_NUMBERS_PER_CALL)
        team.tell_released()
        with team.nothing_half_done(0 if keep else remote.call, base, _NUMBERS_PER_CALL):
            return self._run_backward(graph, remote, join, gradients, inputs, base, keep=keep)

    def _run_backward(
        self, graph: Graph, remote: RemoteGraph, join: Join, gradients: Sequence[Tensor | None],
        inputs: Sequence[int], base: int, *, keep: bool,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:  # fmt: skip
        team = self.team
        with record_function("evenly.backward: send gradients"):
            own = self._send_gradients(join, gradients, base, keep=keep)
        if not keep:
            self._graph = self._remote = None
            remote.spent()
        failure: BaseException | None = None
        mine: tuple[list[Tensor | None], dict[int, Tensor | None]] = ([], {})
        try:
            with record_function("evenly.backward: own shard"):
                started = time.perf_counter()
                with shared_cores(threads_per_replica(team.size)), in_backward(self._peers(), base, self.replicas):
                    mine = backward(graph, own, self.model.leaves, keep=keep)
                self.work.seconds += time.perf_counter() - started
        except Exception as error:  # noqa: BLE001 - raised again below, when the replicas are done
            self._peers().refuse(base)
            failure = error
        with record_function("evenly.backward: wait for replicas"):
            replies = [self._reply(replica) for replica in range(1, self.replicas)]
        try:
            done = _unless_failed(failure, replies)
        finally:
            del failure, replies  # see [Note: raised later]
        with record_function("evenly.backward: sum gradients"):
            total = self._sum(mine[0], done, list(own.values()))
        return [total[position] for position in self._trainable], [
            self._input_gradient(position, mine[1].get(position), done, base) for position in inputs
        ]

    def _send_gradients(
        self, join: Join, gradients: Sequence[Tensor | None], base: int, *, keep: bool
    ) -> dict[int, Tensor]:
        """Send to each replica what flows into its outputs; returns what flows into the driver's."""
        assert self._remote is not None  # noqa: S101 - checked by the caller
        own: dict[int, Tensor] = {}
        specs: list[list[tuple[int, bool, Any]]] = [[] for _ in range(1, self.replicas)]
        data: list[list[Tensor]] = [[] for _ in range(1, self.replicas)]
        for joint, gradient in zip(join.joints, gradients, strict=True):
            if gradient is None:
                continue
            for replica, (position, part) in enumerate(
                zip(joint.positions, joint.spread(gradient.detach()), strict=True)
            ):
                if position is None or part is None:
                    continue
                if replica == 0:
                    assert isinstance(part, Tensor)  # noqa: S101 - the driver's own rows are here
                    own[position] = own[position] + part if position in own else part
                elif not self._differentiable[replica - 1][position]:
                    continue
                elif isinstance(part, Handle):
                    specs[replica - 1].append((position, False, part.check()))
                else:
                    spec, flat = wire_form(part)
                    specs[replica - 1].append((position, True, spec))
                    data[replica - 1].append(flat)
        for replica in range(1, self.replicas):
            call = self._remote.call if any(self._differentiable[replica - 1]) else 0
            header = (int(Command.BACKWARD), call, keep, base, self.replicas, tuple(specs[replica - 1]))
            self.team.ask(replica, encode(header), data[replica - 1])
        return own

    def _reply(self, replica: int) -> _Reply | BaseException:
        found = self.team.answer(replica)
        if isinstance(found, BaseException):
            return found
        present, metas, payload, specs = found
        tensors = [receive_tensor(self.team.channel(replica), spec) for spec in specs]
        inputs = {meta[0]: meta[1:] for meta in metas}
        return _Reply(replica, present, inputs, unpack(payload, tensors) if payload else [])

    def _sum(self, own: list[Tensor | None], replies: list[_Reply], incoming: list[Tensor]) -> list[Tensor | None]:
        """Gradients of all leaves: the driver's, plus those of the replicas, in their order."""
        total = list(own)
        foreign = {tensor.untyped_storage().data_ptr() for tensor in incoming}
        for position, gradient in enumerate(total):
            # Autograd may hand over what the user passed to backward(); that must not be added to.
            if (
                gradient is not None
                and gradient.layout is torch.strided
                and (gradient.untyped_storage().data_ptr() in foreign)
            ):
                total[position] = gradient.clone()
        assert self.model.collectives is not None  # noqa: S101 - it had a forward
        total = self.model.collectives.total(total, {reply.replica: reply.present for reply in replies})
        for reply in replies:
            sparse = iter(reply.sparse)
            for position, present in enumerate(reply.present):
                if present == _SPARSE:
                    before, addend = total[position], next(sparse)
                    total[position] = addend if before is None else before + addend
        return total

    def _input_gradient(self, position: int, own: Tensor | None, replies: list[_Reply], base: int) -> Tensor | None:
        """The gradient of one input; sharded when the input is."""
        leaf = self.leaves[position]
        handle = Handle(self.team, base + position)
        answered = {reply.replica: bool(reply.inputs.get(position)) for reply in replies}
        there = [answered.get(replica, False) for replica in range(1, self.replicas)]
        if own is None and not any(there):
            return None
        if self._resident(leaf) is not None and own is not None and all(there) and leaf.dim is not None:
            return ShardedTensor.of_rows(self.team, own, handle, leaf.dim, self.plan.rows)
        parts = [own]
        for replica, present in enumerate(there, 1):
            parts.append(fetch_from(self.team, replica, handle) if present else None)
        return self.plan.merge(leaf, parts)


@dataclass
class _Reply:
    """What a replica says after its backward.

    Attributes:
        replica: Who says it.
        present: Per leaf 0: no gradient; 1: one in shared memory; 2: a sparse one.
        inputs: Per position of an input its gradient's dtype and shape; empty if there is none.
        sparse: The sparse ones, in order.
    """

    replica: int
    present: bytes
    inputs: dict[int, tuple[Any, ...]]
    sparse: list[Tensor]


class RemoteGraph:
    """The replicas' graphs of one call. They forget them when the last reference to this goes."""

    __slots__ = ("call", "generation", "team")

    def __init__(self, team: Team, call: int) -> None:
        self.team = team
        self.call = call
        self.generation = team.generation

    def check(self) -> None:
        """Whether the graphs still exist.

        Raises:
            RuntimeError: The replicas have been replaced since the forward.
        """
        if self.generation != self.team.generation or not self.team.pids():
            message = "the replicas that hold this graph have been stopped or have died: run the forward again"
            raise RuntimeError(message)

    def spent(self) -> None:
        """The backward has freed them already."""
        self.generation = -1

    def __del__(self) -> None:
        self.team.release(self.generation, call=self.call)


_T = TypeVar("_T")


def _unless_failed(own: BaseException | None, found: Sequence[_T | BaseException]) -> list[_T]:
    """What the replicas answered.

    Raises:
        BaseException: What the driver's own shard or a replica failed with: the first, but rather not a failure that
            only says that another replica failed.
    """
    failures = [failure for failure in (own, *found) if isinstance(failure, BaseException)]
    if not failures:
        return [answer for answer in found if not isinstance(answer, BaseException)]
    failure = next((failure for failure in failures if not isinstance(failure, ExchangeError)), failures[0])
    try:
        raise failure
    finally:
        del own, found, failures, failure  # see [Note: raised later] in team.py


def _is_view_of(part: Tensor, whole: Tensor) -> bool:
    return part.layout is torch.strided and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _stand_in() -> Tensor:
    """A tensor that stands for another in a pickle."""
    return torch.empty(0)
