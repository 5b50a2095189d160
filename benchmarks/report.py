"""The results as Markdown."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from growth import Points
from processes import CORES, KINDS
from results import MOST_DIFFERENCE, Results, Verdict, verdicts
from turns import PARITY_STEPS, Spread, Turns

_MB = 1_000_000


def machine() -> str:
    """What this was measured on, in a line."""
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return f"{models[0] if models else platform.machine()}, {CORES} cores, {memory:.0f} GiB"


def versions() -> str:
    """What this was measured with, in a line."""
    names = ("evenly", "torch")
    known = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    found = [f"{name} {known[name]}" for name in names if name in known]
    return ", ".join([*found, f"Python {platform.python_version()}", f"Linux {platform.release()}"])


def markdown(results: Results, seconds: float, load: float) -> str:
    """The whole report.

    Args:
        results: What was measured.
        seconds: What that took.
        load: The machine's load average before.
    """
    sections = [_head(results, seconds, load), *_sections(results)]
    return "\n\n".join(sections) + "\n"


def _head(results: Results, seconds: float, load: float) -> str:
    rounds = sorted({turns.rounds for turns in results.turns.values()})
    said = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else "".join(map(str, rounds)) or "no"
    brief = "medians, with quartiles in brackets; ratios compare turns of the same round"
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    return (
        f"# Results\n\n{machine()}; {versions()}; {today}. {results.replicas} replicas, one thread each; {said} rounds "
        f"of turns A B C A B C … in one run of {seconds / 60:.1f} minutes (load average before: {load:.1f}). Figures "
        f"are {brief}. How to read them: [README.md](README.md)."
    )


def _sections(results: Results) -> Iterator[str]:
    if judged := list(verdicts(results)):
        yield "## Targets\n\n" + _table(["figure", "measured", "target", ""], map(_verdict, judged))
    if results.turns:
        yield from _workloads(results)
    for workload, points in results.by_replicas.items():
        yield f"## Growth with replicas: {workload}\n\n" + _growth(points, "replicas")
    if results.by_parameters:
        yield "## Growth with parameters\n\n" + _growth(results.by_parameters, "million parameters")
    if results.by_tensors:
        yield "## Growth with parameter tensors\n\n" + _growth(results.by_tensors, "tensors")
    yield from _costs(results)
    yield from _phases(results)


def _verdict(verdict: Verdict) -> list[str]:
    unit = f" {verdict.unit}" if verdict.unit else ""
    sign = "≥" if verdict.at_least else "≤"
    measured = _spread(verdict.value) if isinstance(verdict.value, Spread) else _number(verdict.value)
    return [
        verdict.what, measured + unit, f"{sign} {_number(verdict.bound)}{unit}", "met" if verdict.met else "**not met**"
    ]  # fmt: skip


# ---------------------------------------------------------------------- workloads


def _workloads(results: Results) -> Iterator[str]:
    names = [name for name in KINDS if any(name in turns.milliseconds for turns in results.turns.values())]
    yield "## Workloads: milliseconds a step\n\n" + _table(
        ["", *names],
        ([workload, *(_spread(turns.time(name)) for name in names)] for workload, turns in results.turns.items()),
    )
    for reference in ("limit", "ddp"):
        others = [name for name in names if name != reference]
        if reference in names and others:
            yield f"## Workloads: throughput, {reference} = 1\n\n" + _table(
                ["", *others],
                (
                    [workload, *(_spread(turns.throughput(name, reference)) for name in others)]
                    for workload, turns in results.turns.items()
                ),
            )
    if results.differences:
        checked = sorted({name for found in results.differences.values() for name in found}, key=list(KINDS).index)
        yield (
            f"## Workloads: are they right?\n\nLargest difference of a parameter after {PARITY_STEPS} steps, relative "
            f"to how far these moved it; anything above {MOST_DIFFERENCE:.0e} is an error. Batch normalisation has "
            "statistics of its own in every replica, with evenly as with DDP, so there DDP is what to agree with.\n\n"
        ) + _table(
            ["", "compared with", *checked],
            (
                [workload, results.references[workload], *(f"{found[n]:.0e}" if n in found else "" for n in checked)]
                for workload, found in results.differences.items()
            ),
        )


# ---------------------------------------------------------------------- growth and costs


def _growth(points: Points, what: str) -> str:
    names = list(next(iter(points.values())).milliseconds)
    compared = [(name, "limit") for name in names if name != "limit"] if "limit" in names else []
    over = [(name, "bare1") for name in names if name not in {"bare1", "limit"}] if "bare1" in names else []
    head = [what, *(f"{name}, ms" for name in names)]
    head += [f"{name} / {reference}" for name, reference in compared] + [f"{name} - {ref}, ms" for name, ref in over]

    def row(count: int, turns: Turns) -> list[str]:
        cells = [str(count), *(_spread(turns.time(name)) for name in names)]
        cells += [_spread(turns.throughput(*pair)) for pair in compared]
        return cells + [_spread(turns.excess(*pair)) for pair in over]

    return _table(head, (row(count, turns) for count, turns in points.items()))


def _costs(results: Results) -> Iterator[str]:
    if (reduction := results.reduction) is not None:
        yield (
            "## Reducing gradients of 100 MB\n\nForward and backward beyond those of the limit: "
            f"{_spread(reduction.excess)} ms. Copying 100 MB with all cores: {_spread(reduction.copy)} ms. "
            f"Ratio: {_spread(reduction.ratio)}."
        )
    if results.start_up:
        yield "## Start-up, from starting Python to the first loss\n\n" + _table(
            ["replicas", "seconds", "/ bare"],
            (
                [str(count or "bare"), _spread(Spread.of(seconds)), _spread(results.start_up_ratio(count))]
                for count, seconds in results.start_up.items()
            ),
        )
    if results.memory:
        yield (
            f"## Memory on {results.memory_workload}\n\nPSS summed over all processes, in MB, the highest seen while "
            "training; *idle* is the same with a model that weighs nothing. Training keeps parameters, momentum and "
            f"gradients: with parameters and momentum once and gradients per replica that makes {2 + results.replicas} "
            "sizes of the parameters.\n\n"
        ) + _table(
            ["", "idle", "peak", "parameters", "peak - idle, in sizes of the parameters"],
            (
                [name, *(f"{size / _MB:.0f}" for size in (m.idle, m.peak, m.parameters)), f"{m.copies:.2f}"]
                for name, m in results.memory.items()
            ),
        )


# ---------------------------------------------------------------------- phases


def _phases(results: Results) -> Iterator[str]:
    found = dict(results.phases)
    if results.reduction is not None:
        found["gradients of 100 MB, without an update"] = results.reduction.phases
    if not found:
        return
    yield (
        "## Where a step's time goes\n\nIn the driver, microseconds a step; *own* is what no phase within it accounts "
        "for. The profiler itself slows down small steps."
    )
    for workload, phases in found.items():
        whole = phases[0]["total"]
        yield f"### {workload}\n\n" + _table(
            ["phase", "µs", "own", "share"],
            (
                [
                    "&emsp;" * (len(phase["path"]) - 1) + phase["path"][-1],
                    f"{phase['total']:,.0f}", f"{phase['self']:,.0f}", f"{phase['total'] / whole:.0%}",
                ]
                for phase in phases
            ),
        )  # fmt: skip


# ---------------------------------------------------------------------- words


def _number(value: float) -> str:
    """Three digits that count."""
    if value == 0:
        return "0"
    if abs(value) < 0.002:
        return f"{value:.0e}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.095 else 3
    return f"{value:,.{digits}f}"


def _spread(spread: Spread) -> str:
    if spread.low == spread.high:
        return _number(spread.median)
    return f"{_number(spread.median)} [{_number(spread.low)}, {_number(spread.high)}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []  # noqa: PTH110
