"""The contenders as the harness sees them: groups of worker processes that wait between turns.

Nothing here imports torch: the harness takes no memory and no threads from those it measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CORES = len(os.sched_getaffinity(0))
ANSWER_SECONDS = 180
STOP_SECONDS = 10
MARK = "EVENLY_BENCHMARK"
"""An environment variable by which everything that descends from a contender is found again."""


@dataclass(frozen=True)
class Kind:
    """How a contender runs.

    Attributes:
        name: As in tables.
        trainer: As in `contenders.TRAINERS`.
        what: In a few words.
        alone: One process, whatever the number of replicas; otherwise one per replica.
        threads: Intra-op threads of each process.
    """

    name: str
    trainer: str
    what: str
    alone: bool
    threads: int = 1


KINDS = {
    kind.name: kind
    for kind in (
        Kind("limit", "limit", "processes that do not talk", alone=False),
        Kind("evenly", "evenly", "`evenly.DataParallel`", alone=True),
        Kind("ddp", "ddp", "`DistributedDataParallel`, gloo", alone=False),
        Kind("threads", "threads", "what `nn.DataParallel` does", alone=True, threads=CORES),
        Kind("bare1", "bare", "one process, one thread", alone=True),
        Kind("bare", "bare", "one process, all threads", alone=True, threads=CORES),
    )
}


class WorkerError(RuntimeError):
    """A worker has failed or died; the message holds its own words."""


class Worker:
    """One process, and the pipes to it."""

    def __init__(self, kind: Kind, rank: int, count: int, rendezvous: Path, mark: str) -> None:
        self.name = f"{kind.name} {rank}"
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        environment = os.environ | {
            "OMP_NUM_THREADS": str(kind.threads),
            "MKL_NUM_THREADS": str(kind.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            MARK: mark,
        }
        self.popen = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("worker.py")),
                kind.trainer,
                str(rank),
                str(count),
                rendezvous,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=environment,
            # Ctrl-C in the terminal is for the harness, which then ends its workers in order.
            start_new_session=True,
        )

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command; :meth:`answer` must follow."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(command).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._failure("has died")) from None

    def answer(self) -> Any:
        """Wait for the answer to the last command."""
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], ANSWER_SECONDS)[0]:
            raise WorkerError(self._failure(f"has not answered for {ANSWER_SECONDS} s"))
        line = self.popen.stdout.readline()
        if not line:
            raise WorkerError(self._failure("has died"))
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name} failed:\n{answer['error']}")
        return answer["value"]

    def _failure(self, what: str) -> str:
        self._words.seek(0)
        return f"{self.name} {what}; its last words:\n{self._words.read()[-4000:].decode(errors='replace')}"

    def close(self) -> None:
        """Tell it to end."""
        with contextlib.suppress(BrokenPipeError):
            assert self.popen.stdin is not None
            self.popen.stdin.close()

    def stop(self, deadline: float) -> None:
        """See it end: by itself until `deadline` (of the monotonic clock), then killed."""
        try:
            self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._words.close()


class Contender:
    """The processes of one contender.

    Args:
        kind: Which one.
        replicas: Shards of a batch, and processes unless it is `alone`.
        folder: For files that its processes meet at.
    """

    def __init__(self, kind: Kind, replicas: int, folder: Path) -> None:
        self.kind = kind
        self.name = kind.name
        self.mark = uuid.uuid4().hex
        count = 1 if kind.alone else replicas
        self.workers: list[Worker] = []
        self.active: list[Worker] = []
        try:
            for rank in range(count):
                self.workers.append(Worker(kind, rank, count, folder / self.mark, self.mark))
        except BaseException:
            self.stop()
            raise

    def await_ready(self) -> None:
        """Wait until all processes take commands."""
        for worker in self.workers:
            worker.answer()

    def load(self, workload: str, replicas: int) -> int:
        """Get a workload ready, in as many processes as there are replicas; returns the bytes of its parameters."""
        self.active = self.workers if self.kind.alone else self.workers[:replicas]
        return self.do("load", workload=workload, replicas=replicas)[0]

    def steps(self, count: int) -> float:
        """Run some steps; returns seconds until the last process was done."""
        return max(self.do("steps", count=count))

    def do(self, command: str, **arguments: Any) -> list[Any]:
        """Have all active processes do something, at the same time; returns their answers."""
        for worker in self.active or self.workers:
            worker.tell({"do": command, **arguments})
        return [worker.answer() for worker in self.active or self.workers]

    def processes(self) -> list[int]:
        """Process ids of everything that belongs to it, replicas included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process.pid)
        return found

    def stop(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.close()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            worker.stop(deadline)


@contextlib.contextmanager
def started(names: list[str], replicas: int) -> Iterator[dict[str, Contender]]:
    """Contenders that are ready, in the order of their names; all processes end with the block."""
    contenders: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory(prefix="evenly-benchmark-") as folder:
        try:
            for name in names:
                contenders[name] = Contender(KINDS[name], replicas, Path(folder))
            for contender in contenders.values():
                contender.await_ready()
            yield contenders
        finally:
            for contender in contenders.values():
                contender.stop()
