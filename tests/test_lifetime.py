"""Nothing outlives what it is for: replicas their driver and their models, memory and files their step."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch

import orders
from evenly import DataParallel
from orders import BOUND_SECONDS, Obedient, X, living, on, wait_for

HEADER = """
import evenly
import ctypes, os, signal, sys, threading, time
import torch
import orders
from orders import *

model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
out = model(X)
from footprint import nursery
open(sys.argv[1] + "-nursery", "w").write(str(nursery().pid))
"""


def start(body, sign, **environment):
    """A driver in a process of its own, which has a path that it may write to."""
    here = os.fspath(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", HEADER + textwrap.dedent(body), os.fspath(sign)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def expect_gone(processes):
    started = time.monotonic()
    while left := living(processes):
        assert time.monotonic() - started < BOUND_SECONDS, left
        time.sleep(0.01)


def nursery_of(sign):
    return psutil.Process(int(Path(f"{sign}-nursery").read_text()))


# ---------------------------------------------------------------------- the driver's end

KILLED_WHILE = {
    "idle": "open(sign, 'w'); time.sleep(600)",
    "in forward": "model(X, on('second', WAIT), sign=sign)",
    "in a forward that never lets go": "model(X, on('second', COMPUTE), sign=sign)",
    "in backward": "model(X, backward_orders=on('second', WAIT), sign=sign).sum().backward()",
    "with a worker of a DataLoader": """
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index):
                open(sign, 'w'); time.sleep(600)
        next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))
    """,
    "holding the GIL": """
        class Stuck(Obedient):
            def forward(self, x):
                if evenly.team.presence.inside_replica():
                    open(sign, 'w')
                    ctypes.PyDLL(None).sleep(600)
                return super().forward(x)
        DataParallel(Stuck(), device_ids=["cpu", "cpu"])(X)
    """,
    "starting replicas": """
        other = DataParallel(Obedient(), device_ids=["cpu"] * 3)
        open(sign, 'w'); time.sleep(600)
    """,
}


@pytest.mark.parametrize("prefork", ["1", "0"])
@pytest.mark.parametrize("when", KILLED_WHILE)
def test_all_replicas_are_gone_soon_after_a_driver_is_killed(when, prefork, tmp_path):
    sign = tmp_path / "sign"
    body = "sign = sys.argv[1]\n" + textwrap.dedent(KILLED_WHILE[when])
    with start(body, sign, EVENLY_PREFORK=prefork) as driver:
        wait_for(sign.exists)
        nursery = nursery_of(sign)
        wait_for(lambda: len(nursery.children()) == (3 if when == "starting replicas" else 1))
        replicas = nursery.children()
        workers = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        expect_gone([nursery, *replicas])
        for worker in workers:  # it looks for its parent every five seconds only
            worker.kill()


ENDS = {
    "normally": ("", 0),
    "with work in flight": (
        """
        threading.Thread(target=model, args=(X, on('second', WAIT), None, sys.argv[1]), daemon=True).start()
        wait_for(lambda: os.path.exists(sys.argv[1]))
        """,
        0,
    ),
    "by sys.exit": ("sys.exit(3)", 3),
    "by an unhandled exception": ("raise ValueError('unhandled')", 1),
    "by an unhandled exception of a replica": ("model(X, on('second', FAIL))", 1),
    "by os._exit": ("os._exit(4)", 4),
    "by a signal": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "with a graph that was never run backwards": ("keep = model(X).sum()", 0),
    "before its replicas have started": ("other = DataParallel(Obedient(), device_ids=['cpu'] * 3)", 0),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_driver_that_ends_takes_its_replicas_along(how, tmp_path):
    body, code = ENDS[how]
    pids = tmp_path / "pids"
    body = f"open({os.fspath(pids)!r}, 'w').write(f'{{model._team.pids()[0]}} {{nursery().pid}}')\n" + textwrap.dedent(
        body
    )
    with start(body, tmp_path / "sign") as driver:
        out, err = driver.communicate(timeout=60)
    assert driver.returncode == code, err
    assert out == ""
    assert ("Traceback" in err) == (code == 1), err
    assert "rror ignored" not in err
    expect_gone([psutil.Process(pid) for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)])


# ---------------------------------------------------------------------- the model's end


def test_replicas_stop_when_the_last_model_on_their_devices_is_gone():
    first, second = (DataParallel(Obedient(), device_ids=["cpu", "cpu"]) for _ in range(2))
    first(X)
    second(X)
    team = weakref.ref(first._team)
    (process,) = (psutil.Process(pid) for pid in first._team.pids())
    del first
    assert team() is not None
    second(X)
    gc.disable()  # nothing waits for the garbage collector
    try:
        del second
        assert team() is None
    finally:
        gc.enable()
    assert not living([process])


def test_an_output_keeps_the_replicas_that_hold_it():
    model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
    out = model(X)
    wanted = model.module(X)
    del model
    torch.testing.assert_close(out.full_tensor(), wanted)
    out.sum().backward()


def test_a_model_that_is_dropped_while_its_replicas_start_leaves_none():
    model = DataParallel(Obedient(), device_ids=["cpu"] * 3)
    processes = [psutil.Process(pid) for pid in model._team.pids()]
    del model
    assert not living(processes)


def test_what_a_step_leaves_is_freed_without_the_garbage_collector():
    model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
    team, y = model._team, torch.arange(8) % 2

    def step():
        out = model(X)
        torch.nn.functional.cross_entropy(out, y).backward()
        out.sort(0)
        torch.cat([out, out])
        str(out)
        with pytest.raises(ZeroDivisionError):
            model(X, on("second", orders.FAIL))
        with pytest.raises(IndexError):
            torch.nn.functional.cross_entropy(model(X), y + 9)

    step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            step()
        assert _held(team) == [(1, 0, 1)]  # the targets, as long as they live here
    finally:
        gc.enable()


def _held(team):
    from evenly.team.values import ask_report

    with team.lock:
        team.ensure_ready()
        team.tell_released()
        return [held for _, _, _, held in ask_report(team)]


# ---------------------------------------------------------------------- flat over many steps

STEPS = 1000
KEPT_MIB = 2
"""By how much memory may differ: allocators keep up to so much of what is freed. Two kilobytes a step would show."""


def _use(model, step):
    """Bytes, and then descriptors, values in the replicas and tensors, held by the driver and its replicas."""
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in model._team.pids())]
    samples = []
    for _ in range(5):  # the least of several: what is free at the moment is no leak
        for _ in range(10):
            step()
        gc.collect()
        samples.append([process.memory_full_info().uss for process in processes])
    memory = list(map(min, zip(*samples, strict=True)))
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return memory, ([process.num_fds() for process in processes], _held(model._team), tensors)


def _expect_flat(model, step, steps=STEPS):
    for _ in range(steps):  # heaps and caches of known size grow by three megabytes before they are full
        step()
    memory, things = _use(model, step)
    for _ in range(steps - 50):
        step()
    memory_after, things_after = _use(model, step)
    assert things_after == things
    for before, after in zip(memory, memory_after, strict=True):
        assert (after - before) / 2**20 < KEPT_MIB, (memory, memory_after)


BIG = torch.randn(64, 512)
"""An eighth of a megabyte: less, and a few that stay would not show; more, and allocators keep more."""


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(512))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, fail=None):
        self.steps += 1
        if fail is not None and fail[-1]:
            raise ZeroDivisionError
        return x * self.weight, x.sum()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [2, 3])
def test_outputs_that_are_never_used_leave_memory_flat(replicas):
    model = DataParallel(Wide(), device_ids=["cpu"] * replicas)
    _expect_flat(model, lambda: model(BIG))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [2, 3])
def test_exceptions_now_and_then_leave_memory_flat(replicas):
    model = DataParallel(Wide(), device_ids=["cpu"] * replicas)
    count, failed = 0, 0

    def step():
        nonlocal count, failed
        count += 1
        order = [0] * 63 + [count % 10 == 0]
        try:
            out, loss = model(BIG, order)
            if count % 10 == 5:
                out.square().mean().backward(torch.ones(3))
            (out.square().mean() + loss).backward()
        except (ZeroDivisionError, RuntimeError):
            assert count % 5 == 0
            failed += 1

    _expect_flat(model, step)
    assert failed == count // 5


def test_models_that_come_and_go_leave_memory_flat():
    model = DataParallel(Wide(), device_ids=["cpu", "cpu"])
    _expect_flat(model, lambda: DataParallel(Wide(), device_ids=["cpu", "cpu"])(BIG), steps=100)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
