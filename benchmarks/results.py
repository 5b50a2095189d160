"""What a run has found, and whether that is what the library aims at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from costs import Memory, Reduction
from growth import Points, slope
from turns import Spread, Turns

LEAST_OF_LIMIT = {"conv": 0.97, "gpt": 0.97, "wide": 0.95, "mlp": 0.85, "tied lm": 0.93}
LEAST_OF_DDP = {"conv": 1.1, "gpt": 1.07, "wide": 1.5, "mlp": 1.5}
MOST_FIXED_MS = 0.5
MOST_FIXED_MS_PER_REPLICA = 0.1
MOST_US_PER_TENSOR = 3.0
MOST_COPIES_TO_REDUCE = 2.0
MOST_OF_BARE_START_UP = 1.3
LEAST_OF_LIMIT_CROWDED = 0.7
CROWD = 8
MOST_DIFFERENCE = 1e-3
"""Relative to how far a parameter moved, which is a hundredth of its size: 1e-5 of that."""
MEMORY_SLACK = 1.05  # activations, and the rounding of allocators


@dataclass
class Results:
    """Everything measured; a part that was left out is empty.

    Attributes:
        replicas: Of the contenders, unless growth says otherwise.
        turns: Per workload.
        differences: Per workload and contender, how far parameters are from those of the reference.
        references: Per workload, who the reference is.
        phases: Per workload, from `phases.profile`.
        by_replicas: Per workload and number of replicas.
        by_parameters: Per million parameters.
        by_tensors: Per number of parameter tensors.
        reduction: Of a large gradient.
        start_up: Seconds per number of replicas (0: bare), for each round.
        memory: Per contender, on `memory_workload`.
    """

    replicas: int
    turns: dict[str, Turns] = field(default_factory=dict)
    differences: dict[str, dict[str, float]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    phases: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    by_replicas: dict[str, Points] = field(default_factory=dict)
    by_parameters: Points = field(default_factory=dict)
    by_tensors: Points = field(default_factory=dict)
    reduction: Reduction | None = None
    start_up: dict[int, list[float]] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    memory_workload: str = "wide"

    def start_up_ratio(self, replicas: int) -> Spread:
        """Start-up with replicas as a multiple of bare's, round by round."""
        pairs = zip(self.start_up[replicas], self.start_up[0], strict=True)
        return Spread.of(own / bare for own, bare in pairs)


@dataclass(frozen=True)
class Verdict:
    """A figure beside its target.

    Attributes:
        what: The figure's name.
        value: What was measured; its median where it has a spread.
        bound: What is aimed at.
        at_least: Whether more is better.
        unit: Of both.
    """

    what: str
    value: Spread | float
    bound: float
    at_least: bool = False
    unit: str = ""

    @property
    def figure(self) -> float:
        """The number that counts."""
        return self.value.median if isinstance(self.value, Spread) else self.value

    @property
    def met(self) -> bool:
        """Whether the target is."""
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound


def verdicts(results: Results) -> Iterator[Verdict]:
    """All targets that the results say something about."""
    yield from _step_verdicts(results)
    yield from _growth_verdicts(results)
    if results.reduction is not None:
        yield Verdict(
            "reducing gradients of 100 MB, in copies of 100 MB", results.reduction.ratio, MOST_COPIES_TO_REDUCE
        )
    for count in results.start_up:
        if count:
            name = f"start-up with {count} replicas / bare's"
            yield Verdict(name, results.start_up_ratio(count), MOST_OF_BARE_START_UP)
    if "evenly" in results.memory:
        # Parameters and momentum once, gradients once per replica.
        most = (2 + results.replicas) * MEMORY_SLACK
        yield Verdict(
            f"memory on *{results.memory_workload}*, in sizes of its parameters", results.memory["evenly"].copies, most
        )
    for workload, differences in results.differences.items():
        if "evenly" in differences:
            name = f"difference from {results.references[workload]}, *{workload}*"
            yield Verdict(name, differences["evenly"], MOST_DIFFERENCE)


def _step_verdicts(results: Results) -> Iterator[Verdict]:
    for reference, targets in (("limit", LEAST_OF_LIMIT), ("ddp", LEAST_OF_DDP)):
        for workload, bound in targets.items():
            turns = results.turns.get(workload)
            if turns is not None and {"evenly", reference} <= turns.milliseconds.keys():
                name = f"throughput / {reference}'s, *{workload}*"
                yield Verdict(name, turns.throughput("evenly", reference), bound, at_least=True)


def _growth_verdicts(results: Results) -> Iterator[Verdict]:
    tiny = results.turns.get("tiny")
    if tiny is not None and {"evenly", "bare1"} <= tiny.milliseconds.keys():
        name = f"fixed cost of a step over bare's, {results.replicas} replicas"
        yield Verdict(name, tiny.excess("evenly", "bare1"), MOST_FIXED_MS, unit="ms")
    by_replicas = results.by_replicas.get("tiny", {})
    if sum(count >= 2 for count in by_replicas) >= 2:
        name = "fixed cost of each further replica"
        yield Verdict(name, slope(by_replicas, "evenly", "bare1", least=2), MOST_FIXED_MS_PER_REPLICA, unit="ms")
    for workload, points in results.by_replicas.items():
        if CROWD in points and workload != "tiny":
            name = f"throughput / limit's, {CROWD} replicas, *{workload}*"
            yield Verdict(name, points[CROWD].throughput("evenly", "limit"), LEAST_OF_LIMIT_CROWDED, at_least=True)
    if len(results.by_tensors) >= 2:
        name = "cost of each parameter tensor beyond bare's"
        yield Verdict(name, slope(results.by_tensors, "evenly", "bare1") * 1000, MOST_US_PER_TENSOR, unit="µs")
