"""A transport through a process group: what goes wrong in a collective is told, and nothing stays behind."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import traps
from evenly import DataParallel
from evenly.team import group, groups, shutdown
from evenly.team.errors import ReplicaDied, ReplicaError
from footprint import Footprint, leaks_since
from orders import BOUND_SECONDS, living, wait_for, when_exists
from traps import Told, Trapped, X


@pytest.fixture(autouse=True)
def new_replicas():
    """A group is formed when it is first needed: each test sees it."""
    shutdown()


def over_gloo(module, replicas=2):
    return DataParallel(module, device_ids=["cpu"] * replicas, collectives="gloo")


def step(model):
    model.zero_grad()
    model(X).square().mean().backward()
    model.eval()
    with torch.no_grad():
        seen = [model(X).clone()]
        model.linear.weight.data.mul_(1.5)
        seen.append(model(X).clone())
    model.train()
    return [*seen, *(parameter.grad for parameter in model.parameters())]


def expect_working(model):
    """A step and an evaluation must give what the bare module gives."""
    model.module.trap = None
    bare = copy.deepcopy(model.module)
    for found, wanted in zip(step(model), step(bare), strict=True):
        torch.testing.assert_close(found, wanted)


WHERE = {
    "while they connect": ("connect", 0),
    "in a broadcast": ("start_broadcast", 0),
    "in a reduction": ("start_reduce", 0),
    "in the broadcast of what changed": ("start_broadcast", 2),
}


@pytest.mark.parametrize(("what", "replicas"), [("die", 2), ("die in the middle", 3)])
@pytest.mark.parametrize("when", WHERE)
def test_a_replica_that_dies_in_a_collective_is_named_with_its_signal(when, what, replicas, monkeypatch):
    where, after = WHERE[when]
    model = over_gloo(Trapped(where, what, after=after), replicas)
    started = []
    usual = groups.group_of
    monkeypatch.setattr(groups, "group_of", lambda *args: (started.append(time.monotonic()), usual(*args))[1])
    with pytest.raises(ReplicaDied, match=r"replica 1 .* was killed by SIGKILL") as caught:
        step(model)
    assert time.monotonic() - started[-1] < BOUND_SECONDS
    assert caught.value.returncode == -signal.SIGKILL
    monkeypatch.undo()
    expect_working(model)


@pytest.mark.parametrize("when", WHERE)
def test_an_exception_instead_of_a_collective_is_what_the_driver_raises(when, monkeypatch):
    monkeypatch.setattr(groups, "_ANSWER_SECONDS", 1000)  # nobody has to give up waiting for another
    where, after = WHERE[when]
    replica = 2 if after else 1
    model = over_gloo(Trapped(where, "fail", after=after, replica=replica), 3)
    with pytest.raises(ZeroDivisionError, match="as ordered") as caught:
        step(model)
    cause = caught.value.__cause__
    assert isinstance(cause, ReplicaError)
    assert cause.replica == replica
    expect_working(model)


@pytest.mark.parametrize("when", WHERE)
def test_no_collective_is_waited_for_without_end(when, monkeypatch):
    monkeypatch.setattr(group, "TIMEOUT_SECONDS", 1.0)
    where, after = WHERE[when]
    model = over_gloo(Trapped(where, "freeze", after=after))
    with pytest.raises(TimeoutError, match="lives, but does not come"):
        step(model)
    monkeypatch.undo()
    expect_working(model)


@pytest.mark.parametrize("when", WHERE)
def test_ctrl_c_in_a_collective_and_going_on(when, tmp_path):
    where, after = WHERE[when]
    sign = tmp_path / "sign"
    model = over_gloo(Trapped(where, "wait", sign, after=after))
    thread = when_exists(sign, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        step(model)
    assert time.time() - sign.stat().st_mtime < BOUND_SECONDS
    thread.join()
    expect_working(model)


def test_a_replica_that_dies_while_idle():
    model = over_gloo(Trapped())
    step(model)
    os.kill(model._team.pids()[0], signal.SIGKILL)
    wait_for(model._team._processes[0].death)
    with pytest.raises(ReplicaDied, match="was killed by SIGKILL while it was idle"):
        step(model)
    expect_working(model)


@pytest.mark.parametrize("when", WHERE)
def test_replicas_are_gone_soon_after_a_driver_is_killed_in_a_collective(when, tmp_path):
    where, after = WHERE[when]
    sign, pids = tmp_path / "sign", tmp_path / "pids"
    body = (
        "from test_process_group import *\n"
        f"model = over_gloo(Trapped({where!r}, 'wait', {os.fspath(sign)!r}, {after}), 3)\n"
        f"Path({os.fspath(pids)!r}).write_text(str(model._team.pids()))\n"
        "step(model)"
    )
    here = os.fspath(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", body], env=environment) as driver:
        try:
            wait_for(sign.exists)
            replicas = [psutil.Process(pid) for pid in json.loads(pids.read_text())]
        finally:
            driver.kill()
        assert len(replicas) == 2
        wait_for(lambda: not living(replicas), BOUND_SECONDS)


# ---------------------------------------------------------------------- nothing left, nothing open


def listening(processes):
    found = []
    for process in processes:
        found += [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return found


def threads():
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their number


def test_a_group_leaves_no_port_thread_or_descriptor():
    step(over_gloo(Trapped()))  # whatever stays for good after the first time
    shutdown()
    before, ports, count = Footprint.now(), listening([psutil.Process()]), threads()
    for what in ("", "die", "fail"):
        model = over_gloo(Trapped("start_reduce", what))
        with contextlib.suppress(ReplicaDied, ZeroDivisionError):
            step(model)
        del model
        shutdown()
    assert leaks_since(before) == []
    assert listening([psutil.Process()]) == ports
    wait_for(lambda: threads() <= count)


def test_nobody_else_can_connect():
    model = over_gloo(Trapped(), 3)
    step(model)
    addresses = listening([psutil.Process(), *(psutil.Process(pid) for pid in model._team.pids())])
    assert all(address.ip == "127.0.0.1" for address in addresses)
    for address in addresses:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
    expect_working(model)


def test_a_forked_child_can_let_a_model_go():
    model = over_gloo(Trapped())
    step(model)
    child = os.fork()
    if child == 0:
        del model
        shutdown()
        os._exit(7)
    wait_for(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), seconds=BOUND_SECONDS)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    expect_working(model)


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_default_process_group_stays_the_users(order):
    def initialise():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    if order == "before":
        initialise()
    try:
        model = over_gloo(Trapped())
        expect_working(model)
        assert dist.is_initialized() == (order == "before")
        if order == "after":
            initialise()
        theirs = dist.group.WORLD
        expect_working(model)
        assert dist.group.WORLD is theirs
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
    expect_working(model)


# ---------------------------------------------------------------------- right numbers


def test_gradients_of_a_backward_that_failed_are_not_added_to_a_later_one():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x, fail, use):
            y = x * self.weight if any(use) else x.clone()
            if any(fail):
                y.register_hook(lambda gradient: 1 / 0)
            return y

    x = torch.arange(9.0).view(9, 1).expand(9, 3).contiguous()
    model = over_gloo(Gated(), 3)
    model(x, [False] * 9, [True] * 9)
    with pytest.raises(ZeroDivisionError):
        model(x, [False] * 6 + [True] * 3, [True] * 9).sum().backward()
    model(x, [False] * 9, [True] * 3 + [False] * 3 + [True] * 3).sum().backward()
    wanted = x[[0, 1, 2, 6, 7, 8]].sum(0)
    torch.testing.assert_close(model.weight.grad, wanted)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_parameters_of_any_dtype_arrive_bit_by_bit(dtype):
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            bits = torch.randint(0, 2, (8, 5), dtype=torch.uint8) if dtype is torch.bool else torch.randn(8, 5)
            self.table = torch.nn.Parameter(bits.to(dtype), requires_grad=False)
            self.nothing = torch.nn.Parameter(torch.empty(0, 3))
            self.weight = torch.nn.Parameter(torch.ones(5))

        def forward(self, x):
            table = self.table.real if self.table.is_complex() else self.table
            return x @ table.float() * self.weight

    module = Table()
    model = over_gloo(module)
    x = torch.randn(6, 8)
    model(x).sum().backward()
    torch.testing.assert_close(model(x).full_tensor(), module(x))


def test_a_third_transport_is_one_line():
    model = DataParallel(Told(), device_ids=["cpu"] * 2, collectives="memory")
    model(X)  # replicas hear of the new one with the module that comes from the same file
    model = DataParallel(Told(), device_ids=["cpu"] * 2, collectives="toy")
    before = traps.CountingGroup.collectives
    model(X).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, X.sum(0).expand(2, 3))
    assert traps.CountingGroup.collectives == before + 1
