"""What is paid apart from the step's time: starting, memory; and what reducing a gradient takes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Contender, started
from turns import Pace, Spread, one_round, prepare

REDUCED_MEGABYTES = 100
_COPIES = 5
_PROFILED_STEPS = 10
_SAMPLE_SECONDS = 0.004


# ---------------------------------------------------------------------- start-up


def start_up(replicas: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Seconds from starting Python to the first loss, by number of replicas (0: bare), a number for each round."""
    script = str(Path(__file__).with_name("startup.py"))
    seconds: dict[int, list[float]] = {count: [] for count in replicas}
    for _ in range(rounds):
        for count, measured in seconds.items():
            before = time.perf_counter()
            with subprocess.Popen([sys.executable, script, str(count)], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline(), "the script has failed"
                measured.append(time.perf_counter() - before)
    return seconds


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Memory of a contender, in bytes: PSS, summed over its processes.

    Attributes:
        idle: With a model that weighs nothing: Python, torch, the library.
        peak: The highest seen while a workload was trained.
        parameters: What the workload's parameters take, once.
    """

    idle: int
    peak: int
    parameters: int

    @property
    def copies(self) -> float:
        """What the workload adds, in sizes of its parameters."""
        return (self.peak - self.idle) / self.parameters


def memory(name: str, workload: str, replicas: int, steps: int) -> Memory:
    """Measure one contender, in processes of its own: neighbours would share in its PSS."""
    with started([name], replicas) as contenders:
        contender = contenders[name]
        contender.load("tiny", replicas)
        contender.steps(3)
        with _highest_pss(contender) as idle:
            contender.steps(3)
        parameters = contender.load(workload, replicas)
        contender.steps(2)
        with _highest_pss(contender) as peak:
            contender.steps(steps)
    return Memory(max(idle), max(peak), parameters)


@contextmanager
def _highest_pss(contender: Contender) -> Iterator[list[int]]:
    """Sample the contender's memory, while it works and once afterwards."""
    files = [Path(f"/proc/{pid}/smaps_rollup") for pid in contender.processes()]
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            samples.append(sum(map(_pss, files)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()
        samples.append(sum(map(_pss, files)))


def _pss(rollup: Path) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in rollup.read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------------------------------- reduction


@dataclass(frozen=True)
class Reduction:
    """What it takes to add up gradients, in milliseconds, beside copying as many bytes with all cores.

    Attributes:
        excess: Forward and backward over replicas, beyond those of processes that do not talk.
        copy: Copying the same number of bytes.
        ratio: Of the two, round by round.
        phases: Of a step over replicas, from `phases.profile`.
    """

    excess: Spread
    copy: Spread
    ratio: Spread
    phases: list[dict[str, Any]]


def reduction(contenders: Mapping[str, Contender], replicas: int, pace: Pace) -> Reduction:
    """Measure on a gradient of `REDUCED_MEGABYTES`; `contenders` are limit, evenly and bare."""
    timed = {name: contenders[name] for name in ("limit", "evenly")}
    counts = prepare(timed, f"gradients-{REDUCED_MEGABYTES}", replicas, pace)
    excess: list[float] = []
    copies: list[float] = []
    for _ in range(pace.rounds):
        copies.append(contenders["bare"].do("copy", megabytes=REDUCED_MEGABYTES, times=_COPIES)[0] * 1000)
        milliseconds = one_round(timed, counts)
        excess.append(milliseconds["evenly"] - milliseconds["limit"])
    ratios = [own / copy for own, copy in zip(excess, copies, strict=True)]
    phases = contenders["evenly"].do("profile", count=_PROFILED_STEPS)[0]
    return Reduction(Spread.of(excess), Spread.of(copies), Spread.of(ratios), phases)
