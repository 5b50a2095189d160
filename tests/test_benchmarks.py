"""The benchmark as a user runs it, on the smallest of its workloads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = ("--quick", "--parts", "workloads", "--workloads", "tiny", "--contenders", "evenly,bare1", "--rounds", "1")
MARK = "EVENLY_BENCHMARK_TEST"


@pytest.fixture
def environment(tmp_path):
    # SIGKILL leaves an empty folder behind, which goes with the test's own.
    return os.environ | {MARK: uuid.uuid4().hex, "TMPDIR": str(tmp_path)}


def descendants(environment):
    """Processes that inherited the environment, whoever their parents are by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == environment[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def gone(environment, patience_seconds=10):
    deadline = time.monotonic() + patience_seconds
    while (left := descendants(environment)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def start(environment, *options):
    command = [sys.executable, "-u", str(BENCHMARKS / "run.py"), *SMALL, *map(str, options)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_it_compares_contenders_and_checks_that_they_agree(tmp_path, environment):
    with start(environment, "--output", tmp_path) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    report = (tmp_path / "results.md").read_text()
    sections = [line.removeprefix("## ") for line in report.splitlines() if line.startswith("## ")]
    assert sections == [
        "Targets",
        "Workloads: milliseconds a step",
        "Workloads: are they right?",
        "Where a step's time goes",
    ]
    assert "| &emsp;forward |" in report
    assert "| &emsp;&emsp;evenly." in report
    assert (tmp_path / "results.png").stat().st_size > 0
    assert gone(environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_with_it_however_it_ends(number, tmp_path, environment):
    with start(environment, "--rounds", 10**6, "--output", tmp_path) as process:
        assert "starting" in process.stdout.readline()
        while len(descendants(environment)) < 4:  # this one, the two contenders, a replica
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode != 0
    assert gone(environment)
