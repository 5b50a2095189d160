"""Tensors that live in the replicas, by handle: put there, computed there, fetched from there."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from evenly.team.protocol import DTYPE_NUMBER, Command, encode, receive_tensor, wire_form
from evenly.team.template import Template
from evenly.team.tracebacks import users_line

if TYPE_CHECKING:
    from evenly.team.team import Team


class Handle:
    """A tensor in each of the replicas 1..n-1 that take part, under one number. Forgotten there when this is."""

    __slots__ = ("generation", "number", "team")

    def __init__(self, team: Team, number: int) -> None:
        self.team = team
        self.generation = team.generation
        self.number = number

    def __del__(self) -> None:
        self.team.release(self.generation, value=self.number)

    def check(self) -> int:
        """The number, if the replicas that hold the tensor still live.

        Raises:
            RuntimeError: They were stopped, or one of them died.
        """
        team = self.team
        if self.generation != team.generation or not team.started:
            team.check_owner()
            message = (
                "rows of this tensor were held by replicas that have been stopped or have died; "
                "compute it again, or call .full_tensor() earlier on what must outlive them"
            )
            raise RuntimeError(message)
        return self.number


MOST_DEFINITIONS = 8192
"""Operations that are remembered. Sizes that change with every batch make new ones for ever."""


def define(team: Team, key: Hashable, template: Template) -> int:
    """The number of an operation; the replicas are told of it when it is new."""
    known = team.definitions
    number = known.get(key)
    if number is None:
        if len(known) >= MOST_DEFINITIONS:
            known.clear()  # the replicas forget the old ones as the numbers are given again
        number = len(known)
        team.broadcast(team.size, int(Command.DEFINE), number, template.dumps())
        known[key] = number  # not before all have been told
    return number


Number: TypeAlias = "tuple[int, bytes]"
"""A 0-dim tensor on its way, by value: its dtype's number, and its bytes."""


def number(tensor: Tensor) -> Number:
    """How a 0-dim tensor travels within a command."""
    _, data = wire_form(tensor.detach())
    return DTYPE_NUMBER[data.dtype], ctypes.string_at(data.data_ptr(), data.element_size())


def run(team: Team, replicas: int, operation: int, inputs: Sequence[Handle | Number], outputs: int) -> list[Handle]:
    """Have replicas 1..``replicas``-1 run a defined operation; does not wait for it."""
    if team.many_released():
        team.tell_released()
    numbers = tuple([operand.check() if isinstance(operand, Handle) else operand for operand in inputs])
    first = team.reserve(outputs or 1)
    team.places.note(first, users_line())
    team.broadcast(replicas, int(Command.RUN), operation, numbers, first if outputs else -first)
    return [Handle(team, first + offset) for offset in range(outputs)]


def pardon(team: Team, replicas: int) -> None:
    """When the driver's part of what :func:`run` sent has failed: the replicas need not report theirs."""
    team.broadcast(replicas, int(Command.PARDON))


def put(team: Team, tensors: Sequence[Tensor]) -> Handle:
    """Send one tensor to each of the replicas 1..n-1 (in order; copies, not references)."""
    handle = Handle(team, team.reserve(1))
    for replica, tensor in enumerate(tensors, 1):
        spec, data = wire_form(tensor.detach())
        team.send(replica, encode((int(Command.PUT), handle.number, spec)), (data,))
    return handle


def fetch(
    team: Team, handles: Sequence[Handle], replicas: int, into: Sequence[Sequence[Tensor]] | None = None
) -> list[list[Tensor]]:
    """Bring values here.

    Args:
        team: The team, locked.
        handles: What to bring.
        replicas: From replicas 1..``replicas``-1.
        into: Per replica and handle a tensor to fill; where its shape, dtype and strides allow no copy is made.

    Returns:
        Per replica, per handle, the tensor.

    Raises:
        BaseException: An operation failed in a replica; its own exception.
    """
    team.tell_released()
    request = encode((int(Command.FETCH), tuple([handle.check() for handle in handles])))
    for replica in range(1, replicas):
        team.ask(replica, request)
    found: list[list[Tensor]] = []
    failure: BaseException | None = None
    answer: object = None
    for replica in range(1, replicas):
        answer = team.answer(replica)
        if isinstance(answer, BaseException):
            failure = failure or answer
            continue
        (specs,) = answer
        found.append(
            [_take(team, replica, spec, into[replica - 1][i] if into else None) for i, spec in enumerate(specs)]
        )
    try:
        if failure is not None:
            raise failure
    finally:
        del failure, answer  # see [Note: raised later]
    return found


def fetch_from(team: Team, replica: int, handle: Handle) -> Tensor:
    """Bring one replica's value here."""
    return peek(team, replica, handle.check())


def peek(team: Team, replica: int, number: int) -> Tensor:
    """Bring one replica's value here by its number, which somebody else will give a handle."""
    team.ask(replica, encode((int(Command.FETCH), (number,))))
    (((spec,),),) = team.collect([replica])
    return receive_tensor(team.channel(replica), spec)


def rename(team: Team, replica: int, old: int, new: int) -> None:
    """Have one replica keep a value under another number."""
    team.send(replica, encode((int(Command.RENAME), old, new)))


def _take(team: Team, replica: int, spec: tuple[Any, ...], target: Tensor | None) -> Tensor:
    same_bytes = target is not None and DTYPE_NUMBER[target.dtype] == spec[0] and target.shape == spec[1]
    if target is not None and same_bytes and len(spec) == 2 and target.is_contiguous():  # noqa: PLR2004
        team.receive_into(replica, target)
        return target
    tensor = receive_tensor(team.channel(replica), spec)
    return tensor if target is None else target.copy_(tensor)


def ask_report(team: Team) -> list[tuple[Any, ...]]:
    """Of each of the replicas 1..n-1: rows, seconds, memory; how many values, graphs and models it holds."""
    request = encode((int(Command.REPORT),))
    for replica in range(1, team.size):
        team.ask(replica, request)
    return team.collect(range(1, team.size))
