"""What holds for all tests: one thread per process, and nothing left behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest
import torch

from footprint import Footprint, leaks_since

# Replicas side by side on few cores: more threads than cores only wait for each other, and sums over
# several threads depend on how many there are.
torch.set_num_threads(1)

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_by_the_session() -> Iterator[None]:
    # Python's own helper process stays until the interpreter ends, once anything needed it.
    resource_tracker.ensure_running()
    before = Footprint.now()
    yield
    _expect_nothing_since(before)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_by_the_module(nothing_is_left_by_the_session: None) -> Iterator[None]:
    before = Footprint.now()
    yield
    _expect_nothing_since(before)


def _expect_nothing_since(before: Footprint) -> None:
    _stop_replicas()
    if leaks := leaks_since(before):
        pytest.fail("the tests left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _stop_replicas() -> None:
    """End the replicas that live on between models; a module that started none pays for no import."""
    parity = sys.modules.get("parity")
    if parity is not None:
        parity.let_go()
    team = sys.modules.get("evenly.team")
    if team is not None and hasattr(team, "shutdown"):
        team.shutdown()
