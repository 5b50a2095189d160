"""Measures evenly beside its alternatives, all in one run, in turns.

    python benchmarks/run.py                                   # everything: under ten minutes on two cores
    python benchmarks/run.py --quick                           # a rough look: a minute
    python benchmarks/run.py --parts workloads --workloads mlp,gpt --contenders limit,evenly --rounds 30

A full run writes results.md and results.png beside this file, any other to runs/benchmark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import costs
import growth
import report
from processes import KINDS, Contender, started
from results import MOST_DIFFERENCE, Results, verdicts
from turns import Pace, parity, take_turns

WORKLOADS = ("tiny", "mlp", "wide", "conv", "gpt", "tied lm")
NORMALISED = ("conv",)
PARTS = ("workloads", "replicas", "parameters", "tensors", "reduction", "start-up", "memory")
HERE = Path(__file__).parent
_PROFILED_SECONDS = 1.0


class Names(click.ParamType):
    """Some of a list of names, separated by commas."""

    name = "names"

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = tuple(choices)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Split and check."""
        if isinstance(value, tuple):
            return value
        found = tuple(name.strip() for name in value.split(","))
        for name in found:
            if name not in self.choices:
                self.fail(f"{name!r} is none of {', '.join(self.choices)}.", param, ctx)
        return tuple(name for name in self.choices if name in found)


class Benchmark:
    """One run.

    Args:
        pace: How much is measured.
        replicas: Of every contender.
        quick: Leave out what is large.
    """

    def __init__(self, pace: Pace, replicas: int, quick: bool) -> None:
        self.pace = pace
        self.quick = quick
        self.results = Results(replicas)
        self._started = time.monotonic()

    def run(self, parts: Sequence[str], workloads: Sequence[str], names: Sequence[str]) -> None:
        """Measure some parts."""
        needed = {
            "workloads": names,
            "parameters": ("limit", "evenly", "ddp"),
            "tensors": ("evenly", "ddp", "bare1"),
            "reduction": ("limit", "evenly", "bare"),
        }
        wanted = [name for name in KINDS if any(name in needed.get(part, ()) for part in parts)]
        if wanted:
            self.say(f"starting {', '.join(wanted)}")
            with started(wanted, self.results.replicas) as contenders:
                if "workloads" in parts:
                    for workload in workloads:
                        self.measure({name: contenders[name] for name in names}, workload)
                self._shared(parts, contenders)
        self._alone(parts)

    def measure(self, contenders: dict[str, Contender], workload: str) -> None:
        """Time one workload, check that all compute the same, and profile."""
        results = self.results
        turns = results.turns[workload] = take_turns(contenders, workload, results.replicas, self.pace)
        said = [f"{name} {turns.time(name).median:.3g} ms" for name in contenders]
        self.say(f"{workload}: {', '.join(said)}; {turns.rounds} rounds")
        # Where batches are normalised each replica does so for itself, so bare is nothing to agree with.
        reference = "ddp" if workload in NORMALISED else "bare1"
        others = [name for name in contenders if name not in {"limit", reference}]
        if workload in NORMALISED:
            others = [name for name in others if name not in {"bare", "bare1"}]
        if reference in contenders:
            results.references[workload] = reference
            results.differences[workload] = parity(contenders, reference, others)
        if "evenly" in contenders:
            count = max(3, min(200, round(_PROFILED_SECONDS * 1000 / turns.time("evenly").median)))
            results.phases[workload] = contenders["evenly"].do("profile", count=count)[0]

    def _shared(self, parts: Sequence[str], contenders: dict[str, Contender]) -> None:
        """What the same processes can measure."""
        results, replicas = self.results, self.results.replicas
        if "parameters" in parts:
            self.say("growth with parameters")
            millions = (1, 3, 10) if self.quick else (1, 3, 10, 30, 100)
            results.by_parameters = growth.with_parameters(contenders, millions, replicas, self.pace.smaller(0.4))
        if "tensors" in parts:
            self.say("growth with parameter tensors")
            counts = (10, 100, 500) if self.quick else (10, 100, 500, 1000, 2000)
            results.by_tensors = growth.with_tensors(contenders, counts, replicas, self.pace.smaller(0.4))
        if "reduction" in parts:
            self.say("reducing a gradient of 100 MB")
            results.reduction = costs.reduction(contenders, replicas, self.pace)

    def _alone(self, parts: Sequence[str]) -> None:
        """What needs processes of its own."""
        results, replicas = self.results, self.results.replicas
        if "replicas" in parts:
            self.say("growth with replicas")
            counts = (1, 2, 4) if self.quick else (1, 2, 4, 8)
            workloads = ("tiny", "mlp", "conv")
            results.by_replicas = growth.with_replicas(workloads, counts, self.pace.smaller(0.5))
        if "start-up" in parts:
            self.say("start-up")
            results.start_up = costs.start_up((0, 2, 4), rounds=1 if self.quick else 3)
        if "memory" in parts:
            for name in ("bare1", "limit", "evenly", "ddp"):
                self.say(f"memory: {name}")
                steps = 5 if self.quick else 20
                results.memory[name] = costs.memory(name, results.memory_workload, replicas, steps)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Tell the user what happens."""
        click.echo(f"{self.seconds:5.0f} s  {text}")


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="Few rounds, nothing large: a rough look.")
@click.option("--parts", type=Names(PARTS), default=",".join(PARTS), help="What to measure.")
@click.option("--workloads", type=Names(WORKLOADS), default=",".join(WORKLOADS), help="For the part of that name.")
@click.option("--contenders", type=Names(tuple(KINDS)), default=",".join(KINDS), help="For the part `workloads`.")
@click.option("--rounds", type=click.IntRange(1), help="Turns of each contender, instead of what time allows.")
@click.option("--replicas", type=click.IntRange(2), default=2)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to.")
def main(
    quick: bool,
    parts: tuple[str, ...],
    workloads: tuple[str, ...],
    contenders: tuple[str, ...],
    rounds: int | None,
    replicas: int,
    output: Path | None,
) -> None:
    """Measure evenly beside its alternatives."""
    # Told to end, end as on Ctrl-C: with all processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pace = Pace(rounds=3, turn_seconds=0.1, budget_seconds=5.0, floor=3) if quick else Pace()
    if rounds is not None:
        pace = Pace(rounds, pace.turn_seconds, budget_seconds=3600.0, floor=rounds)
    load = os.getloadavg()[0]
    benchmark = Benchmark(pace, replicas, quick)
    benchmark.run(parts, workloads, contenders)
    full = not quick and (parts, workloads, contenders) == (PARTS, WORKLOADS, tuple(KINDS))
    folder = output or (HERE if full else HERE.parent / "runs" / "benchmark")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(report.markdown(benchmark.results, benchmark.seconds, load))
    if benchmark.results.turns:
        import picture

        picture.draw(benchmark.results, folder / "results.png")
    for verdict in verdicts(benchmark.results):
        if not verdict.met:
            benchmark.say(f"not met: {verdict.what}: {verdict.figure:.3g}, aimed at {verdict.bound:g} {verdict.unit}")
    benchmark.say(f"wrote {folder / 'results.md'}")
    wrong = [
        f"{name} on {workload}"
        for workload, found in benchmark.results.differences.items()
        for name, difference in found.items()
        if not difference <= MOST_DIFFERENCE
    ]
    if wrong:
        raise click.ClickException(f"the parameters differ from bare's: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
