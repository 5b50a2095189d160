"""One process of a contender: waits for a command (a line of JSON), does it, answers with a line, waits again.

    python worker.py KIND RANK COUNT RENDEZVOUS

It ends when its standard input does, and with the process that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1
_PARENT = os.getppid()
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != _PARENT:  # it died before it was watched
    sys.exit(1)

import torch  # noqa: E402 - nothing may happen before the parent is watched
import torch.distributed  # noqa: E402

import phases  # noqa: E402
from contenders import TRAINERS, Trainer  # noqa: E402
from workloads import find  # noqa: E402


class Worker:
    """What a process can be told; a method per command."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind = kind
        self.rank = rank
        self._trainer: Trainer | None = None
        self._source = self._target = torch.empty(0)

    @property
    def trainer(self) -> Trainer:
        """The present one."""
        if self._trainer is None:
            raise RuntimeError("nothing is loaded")
        return self._trainer

    def load(self, workload: str, replicas: int) -> int:
        """Get a workload ready; returns the bytes of its parameters."""
        # The old one goes last: replicas live as long as a model that uses them.
        self._trainer = TRAINERS[self.kind](find(workload), self.rank, replicas)
        return sum(p.numel() * p.element_size() for p in self._trainer.module.parameters())

    def steps(self, count: int) -> float:
        """Run some steps; returns seconds."""
        trainer = self.trainer
        batches = trainer.upcoming(count)
        started = time.perf_counter()
        for x, y in batches:
            trainer.step(x, y)
        return time.perf_counter() - started

    def profile(self, count: int) -> list[dict[str, Any]]:
        """Run some steps under the profiler; returns what each labelled phase took."""
        trainer = self.trainer
        return phases.profile(trainer.labelled_step, trainer.upcoming(count))

    def reset(self) -> None:
        """Start again from the initial parameters."""
        self.trainer.reset()

    def save(self, path: str) -> None:
        """Write the parameters to a file; one process does so for all."""
        if self.rank == 0:
            torch.save([p.detach().clone() for p in self.trainer.module.parameters()], path)

    def compare(self, path: str) -> float:
        """The largest difference of a parameter from that in a file, relative to how far training moved it."""
        trainer, others = self.trainer, torch.load(path)
        initial = trainer.workload.module().parameters()
        found = zip(trainer.module.parameters(), initial, others, strict=True)
        return max(float((p.detach() - other).norm() / (other - start.detach()).norm()) for p, start, other in found)

    def copy(self, megabytes: int, times: int) -> float:
        """Copy memory with all threads of this process; returns seconds for one copy."""
        size = megabytes * 1_000_000 // 4
        if self._source.numel() != size:
            self._source, self._target = torch.ones(size), torch.ones(size)
        started = time.perf_counter()
        for _ in range(times):
            self._target.copy_(self._source)
        return (time.perf_counter() - started) / times


def main() -> None:
    """Serve until the input ends."""
    kind, rank, count, rendezvous = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # Answers go where standard output went; prints go to standard error.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        if kind == "ddp":
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count
            )
        worker = Worker(kind, rank)
        answers.write(json.dumps({"value": "ready"}) + "\n")
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = {"value": getattr(worker, command.pop("do"))(**command)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
        if kind == "ddp":
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
