"""How costs grow: with the number of replicas, of parameters, and of parameter tensors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from processes import Contender, started
from turns import Pace, Turns, take_turns

Points = dict[int, Turns]


def with_replicas(workloads: Sequence[str], counts: Sequence[int], pace: Pace) -> dict[str, Points]:
    """Limit and evenly by number of replicas, on the same batches; bare beside on *tiny*, for the fixed cost."""
    found: dict[str, Points] = {workload: {} for workload in workloads}
    with started(["limit", "evenly", "bare1"], max(counts)) as contenders:
        for count in counts:
            for workload in workloads:
                chosen = {name: c for name, c in contenders.items() if name != "bare1" or workload == "tiny"}
                found[workload][count] = take_turns(chosen, workload, count, pace)
    return found


def with_parameters(contenders: Mapping[str, Contender], millions: Sequence[int], replicas: int, pace: Pace) -> Points:
    """Four square layers, of more and more parameters."""
    chosen = {name: contenders[name] for name in ("limit", "evenly", "ddp")}
    return {count: take_turns(chosen, f"parameters-{count}", replicas, pace) for count in millions}


def with_tensors(contenders: Mapping[str, Contender], counts: Sequence[int], replicas: int, pace: Pace) -> Points:
    """More and more parameter tensors, all small."""
    chosen = {name: contenders[name] for name in ("evenly", "ddp", "bare1")}
    return {count: take_turns(chosen, f"tensors-{count}", replicas, pace) for count in counts}


def slope(points: Points, name: str, reference: str, least: int = 0) -> float:
    """Milliseconds that each further replica or tensor costs beyond the reference: a line through the medians."""
    counts = [count for count in points if count >= least]
    return statistics.linear_regression(counts, [points[n].excess(name, reference).median for n in counts]).slope
