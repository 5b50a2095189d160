"""What the driver no longer needs, until the replicas are told."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from evenly.team.protocol import Command, encode

if TYPE_CHECKING:
    from evenly.team.team import Team

_MANY = 16
_VALUE, _GRAPH, _MODEL, _RANGE = range(4)


class Unneeded:
    """Values, graphs of calls, models and ranges of values to be forgotten.

    Finalizers add to it, from any thread, at any time; that only appends to a queue.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[int, int, int]] = deque()

    def note(self, *, value: int = 0, call: int = 0, model: int = 0) -> None:
        """Note one number, of a kind."""
        if value:
            self._noted.append((_VALUE, value, 1))
        if call:
            self._noted.append((_GRAPH, call, 1))
        if model:
            self._noted.append((_MODEL, model, 1))

    def note_range(self, base: int, count: int) -> None:
        """Note ``count`` values from ``base`` on, of which nobody knows whether they exist."""
        self._noted.append((_RANGE, base, count))

    @property
    def many(self) -> bool:
        """Whether it is worth telling the replicas before the next call."""
        return len(self._noted) >= _MANY

    def command(self) -> tuple[int, bytes]:
        """How much is noted, and the command that tells of it; empty if there is nothing."""
        count = len(self._noted)
        if not count:
            return 0, b""
        # Looked at by index: finalizers append meanwhile, and a queue may not be walked through then.
        numbers: tuple[list[int], ...] = ([], [], [])
        ranges: list[tuple[int, int]] = []
        for position in range(count):
            kind, number, size = self._noted[position]
            if kind == _RANGE:
                ranges.append((number, size))
            else:
                numbers[kind].append(number)
        return count, encode((int(Command.RELEASE), *map(tuple, numbers), tuple(ranges)))

    def told(self, count: int) -> None:
        """The replicas have been told of the first ``count``. Before this, Ctrl-C may have them told twice: no harm."""
        for _ in range(count):
            self._noted.popleft()

    def clear(self) -> None:
        """Forget all: there are other replicas now."""
        self._noted.clear()


class NothingHalfDone:
    """Around a call: if it fails, the replicas forget its graph, and its ``count`` values from ``base`` on.

    A class, because a generator costs several times as much.
    """

    __slots__ = ("_generation", "_numbers", "_team")

    def __init__(self, team: Team, call: int, base: int, count: int) -> None:
        self._team = team
        self._generation = team.generation
        self._numbers = call, base, count

    def __enter__(self) -> None:
        """Nothing to do yet."""

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is not None:  # Ctrl-C, too
            self._team.abandon(self._generation, *self._numbers)
