"""The way back through one call: every replica runs its own graph backwards, and the gradients are added up.

The same class serves twice. The graphs of a forward give gradients; when those are to have gradients themselves (a
gradient penalty), every replica keeps the graph of its gradients, and that is run backwards in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from evenly.batchwide import ThreadState, in_shard
from evenly.ends import End, OfInput, OfParameter, resident
from evenly.explain import name_rows
from evenly.phases import phase
from evenly.sharded import ShardedTensor, plain
from evenly.team.context import shared_cores, threads_per_replica
from evenly.team.exchange import ExchangeError
from evenly.team.execution import GRADIENTS_FROM, Graph, backward, differentiate
from evenly.team.holding import SPARSE
from evenly.team.protocol import Command, encode, receive_tensor, wire_form
from evenly.team.shipping import unpack
from evenly.team.values import Handle, fetch_from

if TYPE_CHECKING:
    from evenly.call import Call
    from evenly.team.team import Team

NUMBERS_PER_CALL = 1 << 16
"""Values that one call may make, counted by position; numbers cost nothing."""


class Reverse:
    """The graphs that one call left in all replicas.

    Args:
        call: The call.
        graph: The driver's own graph.
        remote: Those of the replicas.
        ends: What the graphs lead to, together.
        differentiable: Per replica 1..n-1 whether each output of its graph has one.
    """

    def __init__(
        self,
        call: Call,
        graph: Graph,
        remote: RemoteGraph,
        ends: Sequence[End],
        differentiable: Sequence[Sequence[bool]],
    ) -> None:
        self.call = call
        self.team: Team = call.team
        self.ends = ends
        self._graph: Graph | None = graph
        self._remote: RemoteGraph | None = remote
        self._differentiable = differentiable

    def run(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[int], *, keep: bool, again: bool = False,
        flows: Sequence[int] = (),
    ) -> Gradients:  # fmt: skip
        """Run all replicas' graphs backwards and add up.

        Args:
            gradients: One per end; None where nothing flows.
            inputs: Positions of the inputs whose gradient is wanted.
            keep: Whether the graphs are needed again.
            again: Whether the gradients are to have gradients in turn.
            flows: Of a graph of gradients: the ends of the first graph, by number, whose incoming gradient has a
                gradient that is wanted.

        Raises:
            RuntimeError: The graphs have been freed, or went with their replicas.
            BaseException: Whatever the backward raises, in any replica.
        """
        graph, remote, team = self._graph, self._remote, self.team
        if graph is None or remote is None:
            message = (
                "Trying to backward through the graph a second time: the graphs in the replicas have been freed. "
                "Specify retain_graph=True if you need to backward through them again."
            )
            raise RuntimeError(message)
        remote.check()
        team.phase = "backward"
        base = team.reserve(NUMBERS_PER_CALL)
        second = team.reserve(1) if again else 0
        team.tell_released()
        before = ThreadState()
        try:
            with team.nothing_half_done(0 if keep else remote.call, base, NUMBERS_PER_CALL):
                with phase("backward: send gradients"):
                    own = self._send(remote, gradients, second, base, keep=keep)
                if not keep:
                    self._graph = self._remote = None
                    remote.spent()
                mine, replies = self._run_all(graph, own, base, keep=keep, again=again)
                with phase("backward: sum gradients"):
                    total = self._sum(mine.leaves, replies, list(own.values()))
                back = _Back(self.team, mine, replies, base)
                found = Gradients(
                    [total[position] for position in self.call.trainable],
                    [self._input_gradient(back, position) for position in inputs],
                    [back.flow(self.call.first_ends[number]) for number in flows],
                )
                if mine.second is not None:
                    found.reverse = self._reverse_of(inputs, mine, replies, second)
        except BaseException:  # see [Note: cut off] in batchwide.py
            before.restore_all()
            raise
        return found

    def _run_all(
        self, graph: Graph, own: dict[int, Tensor], base: int, *, keep: bool, again: bool
    ) -> tuple[_Mine, list[_Reply]]:
        """The driver's own graph, and what the replicas answer."""
        call, team = self.call, self.team
        failure: BaseException | None = None
        mine = _Mine([], {})
        try:
            with phase("backward: own shard"):
                started = time.perf_counter()
                threads = threads_per_replica(team.size)
                running = in_shard(call.peers(), base, call.shard(0))
                with shared_cores(threads):
                    if again:
                        mine = _Mine(*differentiate(graph, own, call.model_leaves, running))
                    else:
                        mine = _Mine(*backward(graph, own, call.model_leaves, running, keep=keep))
                call.work.seconds += time.perf_counter() - started
        except Exception as error:
            call.peers().refuse(base)
            name_rows(error, call.plan, 0, team.devices[0])
            failure = error
        with phase("backward: wait for replicas"):
            replies = [self._reply(replica) for replica in range(1, call.replicas)]
        try:
            return mine, unless_failed(failure, replies)
        finally:
            del failure, replies  # see [Note: raised later]

    def _send(
        self, remote: RemoteGraph, gradients: Sequence[Tensor | None], again: int, base: int, *, keep: bool
    ) -> dict[int, Tensor]:
        """Send to each replica what flows into its outputs; returns what flows into the driver's."""
        replicas = self.call.replicas
        own: dict[int, Tensor] = {}
        specs: list[list[tuple[int, bool, Any]]] = [[] for _ in range(1, replicas)]
        data: list[list[Tensor]] = [[] for _ in range(1, replicas)]
        for end, gradient in zip(self.ends, gradients, strict=True):
            if gradient is None:
                continue
            parts = end.spread(_without_history(gradient))
            for replica, (position, part) in enumerate(zip(end.positions, parts, strict=True)):
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
                    spec, flat = wire_form(plain(part))
                    specs[replica - 1].append((position, True, spec))
                    data[replica - 1].append(flat)
        for replica in range(1, replicas):
            call = remote.call if any(self._differentiable[replica - 1]) else 0
            shard = self.call.shard(replica)
            header = (int(Command.BACKWARD), call, keep, again, base, shard, tuple(specs[replica - 1]))
            self.team.ask(replica, encode(header), data[replica - 1])
        return own

    def _reply(self, replica: int) -> _Reply | BaseException:
        found = self.team.answer(replica)
        if isinstance(found, BaseException):
            name_rows(found, self.call.plan, replica, self.team.devices[replica])
            return found
        present, metas, payload, specs = found
        tensors = [receive_tensor(self.team.channel(replica), spec) for spec in specs]
        inputs = {meta[0]: meta[1:] for meta in metas}
        return _Reply(replica, present, inputs, unpack(payload, tensors) if payload else [])

    def _sum(self, own: list[Tensor | None], replies: list[_Reply], incoming: list[Tensor]) -> list[Tensor | None]:
        """Gradients of all leaves: the driver's, plus those of the replicas, in their order."""
        total = list(own)
        # Autograd may hand over what the user passed to backward(); that must not be added to.
        foreign = [
            (start, start + storage.nbytes())
            for storage in map(Tensor.untyped_storage, incoming)
            if (start := storage.data_ptr())
        ]
        for position, gradient in enumerate(total):
            if gradient is not None and gradient.layout is torch.strided:
                address = gradient.data_ptr()
                for start, end in foreign:
                    if start <= address < end:
                        total[position] = gradient.clone()
        collectives = self.call.collectives
        assert collectives is not None  # noqa: S101 - it had a forward
        total = collectives.total(total, {reply.replica: reply.present for reply in replies})
        for reply in replies:
            sparse = iter(reply.sparse)
            for position, present in enumerate(reply.present):
                if present == SPARSE:
                    before, addend = total[position], next(sparse)
                    total[position] = addend if before is None else before + addend
        return total

    def _input_gradient(self, back: _Back, position: int) -> Tensor | None:
        """The gradient of one input; sharded when the input is."""
        call = self.call
        leaf = call.leaves[position]
        own, there = back.mine.inputs.get(position), back.there(position)
        if own is None and not any(there):
            return None
        handle = back.handle(position)
        if own is not None and all(there) and leaf.dim is not None and resident(self.team, call.plan, leaf) is not None:
            return ShardedTensor.of_rows(self.team, own, handle, leaf.dim, call.plan.rows)
        return call.plan.merge(leaf, [own, *back.fetched(position)])

    def _reverse_of(self, inputs: Sequence[int], mine: _Mine, replies: list[_Reply], second: int) -> Reverse:
        """The way back through the gradients that were just found."""
        call = self.call
        assert mine.second is not None  # noqa: S101 - asked for
        count = len(call.model_leaves)
        order = {position: count + number for number, position in enumerate(mine.inputs)}
        everywhere = call.replicas
        ends: list[End] = [OfParameter((position,) * everywhere) for position in call.trainable]
        ends += [
            OfInput((order[position],) * everywhere, self.team, call.plan, call.leaves[position]) for position in inputs
        ]
        flags: list[list[bool]] = []
        for reply in replies:
            has = [bool(present) for present in reply.present] or [False] * count
            flags.append(has + [bool(reply.inputs.get(position)) for position in order])
        return Reverse(call, mine.second, RemoteGraph(self.team, second), ends, flags)


@dataclass
class Gradients:
    """What a backward found.

    Attributes:
        parameters: Of the call's parameters.
        inputs: Of the inputs asked for.
        flows: Of the incoming gradients asked for.
        reverse: The way back through them, if asked for.
    """

    parameters: list[Tensor | None]
    inputs: list[Tensor | None]
    flows: list[Tensor | None]
    reverse: Reverse | None = None


@dataclass
class _Mine:
    """What the driver's own graph gave: gradients of leaves and inputs, and their graph."""

    leaves: list[Tensor | None]
    inputs: dict[int, Tensor | None]
    second: Graph | None = None


@dataclass
class _Reply:
    """What a replica says after its backward.

    Attributes:
        replica: Who says it.
        present: Per leaf 0: no gradient; 1: a dense one, laid out to be summed; 2: a sparse one.
        inputs: Per position of an input its gradient's dtype and shape; empty if there is none.
        sparse: The sparse ones, in order.
    """

    replica: int
    present: bytes
    inputs: dict[int, tuple[Any, ...]]
    sparse: list[Tensor]


@dataclass
class _Back:
    """Gradients of inputs after a backward, here and in the replicas, by position."""

    team: Team
    mine: _Mine
    replies: list[_Reply]
    base: int

    def there(self, position: int) -> list[bool]:
        """Which of the replicas 1..n-1 have one."""
        return [bool(reply.inputs.get(position)) for reply in self.replies]

    def handle(self, position: int) -> Handle:
        """All replicas' values of this position."""
        return Handle(self.team, self.base + position)

    def fetched(self, position: int) -> list[Tensor | None]:
        """The values of replicas 1..n-1, here."""
        handle = self.handle(position)
        there = enumerate(self.there(position), 1)
        return [fetch_from(self.team, replica, handle) if present else None for replica, present in there]

    def flow(self, end: End) -> Tensor | None:
        """The gradient of what flowed into an end of the first graph."""
        own = None if end.positions[0] is None else self.mine.inputs.get(GRADIENTS_FROM + end.positions[0])
        places = end.positions[1:]
        if own is not None and len(set(places)) == 1 and places[0] is not None:
            position = GRADIENTS_FROM + places[0]
            if all(self.there(position)):
                return end.collect([own], self.handle(position))
        parts = [own]
        for replica, place in enumerate(places, 1):
            position = GRADIENTS_FROM + (place or 0)
            present = place is not None and bool(self.replies[replica - 1].inputs.get(position))
            parts.append(fetch_from(self.team, replica, self.handle(position)) if present else None)
        return end.collect(parts, None)


def _without_history(gradient: Tensor) -> Tensor:
    """The value of a gradient, in memory: what autograd has for zeros has none."""
    if gradient._is_zerotensor():
        return torch.zeros_like(gradient)
    return gradient.detach() if gradient.requires_grad else gradient


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
        if self.generation != self.team.generation or not self.team.started:
            message = "the replicas that hold this graph have been stopped or have died: run the forward again"
            raise RuntimeError(message)

    def spent(self) -> None:
        """The backward has freed them already."""
        self.generation = -1

    def __del__(self) -> None:
        self.team.release(self.generation, call=self.call)


_T = TypeVar("_T")


def unless_failed(own: BaseException | None, found: Sequence[_T | BaseException]) -> list[_T]:
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
