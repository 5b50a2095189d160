"""Measuring in turns: A B C A B C …, so that whatever else the machine does hits all contenders alike."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processes import Contender

_PAUSE_SECONDS = 0.01
"""Between turns: threads and replicas that still spin in hope of work go to sleep meanwhile."""
_TRIAL_SECONDS = 0.25
PARITY_STEPS = 2
"""Few: only rounding may differ, but where a ReLU falls the other way that grows a thousandfold within three more."""


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers, and where half of them lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Median and quartiles."""
        numbers = list(values)
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Pace:
    """How much is measured.

    Attributes:
        rounds: Turns of each contender.
        turn_seconds: What a turn should take.
        budget_seconds: What all rounds of one workload may take; slow ones get fewer rounds, but at least `floor`.
    """

    rounds: int = 15
    turn_seconds: float = 0.3
    budget_seconds: float = 22.0
    floor: int = 5

    def smaller(self, share: float) -> Pace:
        """The same for a measurement that matters less."""
        rounds = max(min(self.rounds, self.floor), round(self.rounds * share))
        return Pace(rounds, self.turn_seconds, self.budget_seconds * share, min(self.floor, rounds))


@dataclass
class Turns:
    """Milliseconds a step of some contenders on one workload, a number for each round."""

    milliseconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How many there were."""
        return max(map(len, self.milliseconds.values()), default=0)

    def time(self, name: str) -> Spread:
        """Milliseconds a step."""
        return Spread.of(self.milliseconds[name])

    def throughput(self, name: str, reference: str) -> Spread:
        """How fast one contender is as a fraction of another, compared round by round."""
        pairs = zip(self.milliseconds[reference], self.milliseconds[name], strict=True)
        return Spread.of(other / own for other, own in pairs)

    def excess(self, name: str, reference: str) -> Spread:
        """Milliseconds a step that one contender takes more than another, round by round."""
        pairs = zip(self.milliseconds[name], self.milliseconds[reference], strict=True)
        return Spread.of(own - other for own, other in pairs)


def take_turns(contenders: Mapping[str, Contender], workload: str, replicas: int, pace: Pace) -> Turns:
    """Load a workload into all contenders, warm up, and measure round by round."""
    counts = prepare(contenders, workload, replicas, pace)
    turns = Turns({name: [] for name in contenders})
    started = time.monotonic()
    for done in range(pace.rounds):
        if done >= pace.floor and (time.monotonic() - started) * (done + 1) / done > pace.budget_seconds:
            break
        for name, milliseconds in one_round(contenders, counts).items():
            turns.milliseconds[name].append(milliseconds)
    return turns


def prepare(contenders: Mapping[str, Contender], workload: str, replicas: int, pace: Pace) -> dict[str, int]:
    """Load a workload into all contenders and warm up; returns the number of steps in a turn of each."""
    counts = {}
    for name, contender in contenders.items():
        contender.load(workload, replicas)
        counts[name] = max(1, round(pace.turn_seconds / _warm_up(contender)))
    return counts


def one_round(contenders: Mapping[str, Contender], counts: Mapping[str, int]) -> dict[str, float]:
    """One turn of each contender; milliseconds a step."""
    milliseconds = {}
    for name, count in counts.items():
        milliseconds[name] = contenders[name].steps(count) / count * 1000
        time.sleep(_PAUSE_SECONDS)
    return milliseconds


def _warm_up(contender: Contender) -> float:
    """Run steps until they are as fast as they get; returns seconds a step."""
    contender.steps(1)
    count = 1
    while (seconds := contender.steps(count)) < _TRIAL_SECONDS:
        count *= 4 if seconds < _TRIAL_SECONDS / 4 else 2
    return seconds / count


def parity(contenders: Mapping[str, Contender], reference: str, others: Sequence[str]) -> dict[str, float]:
    """Train the loaded workload anew for a few steps.

    Returns:
        Per contender, the largest difference of a parameter from the reference's, relative to how far training moved
        that one.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "parameters.pt")
        for name in (reference, *others):
            contenders[name].do("reset")
            contenders[name].steps(PARITY_STEPS)
        contenders[reference].do("save", path=path)
        return {name: max(contenders[name].do("compare", path=path)) for name in others}
