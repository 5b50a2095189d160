"""Exceptions, deaths and Ctrl-C in the middle of a step: a clear error, and the model works again."""

from __future__ import annotations

import os
import signal
import time
import weakref

import pytest
import torch
from torch.nn import functional as F

import orders
from evenly import DataParallel
from evenly.team.errors import ReplicaDied, ReplicaError
from evenly.team.values import ask_report
from orders import BOUND_SECONDS, Obedient, ShapeError, X, expect_working, on, wait_for, when_exists
from parity import REPLICAS


@pytest.fixture(scope="module", params=REPLICAS)
def model(request):
    model = DataParallel(Obedient(), device_ids=["cpu"] * request.param)
    model(X)
    # pytest keeps what a fixture gives until after the check that nothing is left.
    yield weakref.proxy(model)
    del model


def last(model):
    """The number of the replica that has the last rows, those that orders to the second shard go to."""
    return len(model.device_ids) - 1


def held_by_replica(model):
    """Values, graphs and models that each replica holds once the driver has said what it no longer needs."""
    team = model._team
    with team.lock:
        team.ensure_ready()
        team.tell_released()
        return [held for _, _, _, *held in ask_report(team)]


# ---------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("shards", ["first", "second", "both"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_arrives_with_its_type_and_the_next_call_works(model, shards, phase):
    before = held_by_replica(model)
    with pytest.raises(ZeroDivisionError, match="as ordered") as caught:  # noqa: PT012 - which of them is the point
        out = model(X, **{f"{phase}_orders": on(shards, orders.FAIL)})
        assert phase == "backward"
        out.sum().backward()
    if shards == "second":
        cause = caught.value.__cause__
        assert isinstance(cause, ReplicaError)
        assert (cause.replica, cause.device, cause.phase) == (last(model), "cpu", phase)
        assert 'raise ZeroDivisionError("as ordered")' in str(cause)
        assert "orders.py" in str(cause)
    out = caught = None
    expect_working(model)
    assert held_by_replica(model) == before


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_class_of_two_arguments_keeps_its_attributes(model, phase):
    with pytest.raises(ShapeError, match="want 3, got 4") as caught:
        model(X, **{f"{phase}_orders": on("second", orders.FAIL_WITH_TWO_ARGUMENTS)}).sum().backward()
    assert (caught.value.want, caught.value.got) == (3, 4)
    expect_working(model)


def test_running_out_of_memory_can_be_caught_and_retried_with_half_of_the_batch(model):
    out = None
    most = 4 * len(model.device_ids)  # four rows are too many for a replica
    for rows in (most, most // 2):
        try:
            out = model(torch.cat([X, X])[:rows], [orders.OUT_OF_MEMORY] * rows)
            break
        except MemoryError:
            continue
    assert len(out) == most // 2
    expect_working(model)


@pytest.mark.parametrize("look", [torch.Tensor.item, torch.Tensor.backward, repr])
def test_a_bad_target_in_the_second_shard_names_the_line_that_computed_the_loss(model, look):
    out = model(X)
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 9])
    with pytest.raises(IndexError, match="Target 9 is out of bounds") as caught:
        look(F.cross_entropy(out, y))
    cause = caught.value.__cause__
    assert isinstance(cause, ReplicaError)
    assert "nll_loss" in cause.phase
    assert "look(F.cross_entropy(out, y))" in str(cause)
    expect_working(model)


@pytest.mark.parametrize("targets", ["first", "both"])
def test_a_bad_target_in_the_drivers_own_shard_is_reported_once(model, targets):
    y = torch.tensor([9, 1, 0, 1, 0, 1, 0, 9 if targets == "both" else 1])
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        F.cross_entropy(model(X), y)
    expect_working(model)


def test_a_failure_that_nobody_has_looked_at_is_not_lost(model):
    F.cross_entropy(model(X), torch.tensor([0, 1, 0, 1, 0, 1, 0, 9]))
    with pytest.raises(IndexError, match="Target 9"):
        model(X)
    expect_working(model)


def test_what_depends_on_a_failed_operation_says_so(model):
    loss = F.cross_entropy(model(X), torch.tensor([0, 1, 0, 1, 0, 1, 0, 9]))
    with pytest.raises(IndexError):
        loss.item()
    with pytest.raises(RuntimeError, match="were never computed, because an operation on it or before it has failed"):
        (loss * 2).item()
    expect_working(model)


def test_buffers_that_only_some_replicas_got_are_sent_again():
    class Unshippable:
        def __reduce__(self):
            raise TypeError("stays here")

    class Scaled(Obedient):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x, things=None):
            return super().forward(x) * self.scale

    model = DataParallel(Scaled(), device_ids=["cpu", "cpu"])
    model(X)
    model.scale.fill_(3.0)
    with pytest.raises(TypeError, match="stays here"):
        model(X, [None] * 7 + [Unshippable()])
    torch.testing.assert_close(model(X).full_tensor(), model.module(X))


# ---------------------------------------------------------------------- deaths


def expect_death(act, reason, seconds=BOUND_SECONDS):
    started = time.monotonic()
    with pytest.raises(ReplicaDied, match=reason) as caught:
        act()
    assert time.monotonic() - started < seconds
    return caught.value


def kill_and_see_it_end(model, replica):
    os.kill(model._team.pids()[replica - 1], signal.SIGKILL)
    wait_for(lambda: model._team._processes[replica - 1].death())


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("order", "reason"), [(orders.KILL, "SIGKILL"), (orders.CRASH, "SIGSEGV")])
def test_a_replica_that_is_killed_in_a_step_is_named_with_its_signal(model, phase, order, reason):
    pid = model._team.pids()[-1]
    out = model(X, **{f"{phase}_orders": on("second", order)}) if phase == "backward" else None
    error = expect_death(
        lambda: model(X, on("second", order)) if out is None else out.sum().backward(),
        f"replica {last(model)} .*{pid}.* was killed by {reason} while running {phase}",
    )
    assert (error.pid, error.replica, error.phase, error.device) == (pid, last(model), phase, "cpu")
    if order == orders.CRASH:
        assert "Its last words" in str(error)
        assert 'orders.py", line' in str(error)
    expect_working(model)


def test_a_replica_that_leaves_by_itself_is_named_with_its_exit_code(model):
    expect_death(lambda: model(X, on("second", orders.LEAVE)), r"exited with code 3 while running forward")
    expect_working(model)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("order", [orders.WAIT, orders.COMPUTE])
def test_a_replica_that_is_killed_from_outside_while_the_driver_waits(model, phase, order, tmp_path):
    sign = tmp_path / "sign"
    pid = model._team.pids()[0]
    thread = when_exists(sign, lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(ReplicaDied, match=f"was killed by SIGKILL while running {phase}"):
        model(X, sign=str(sign), **{f"{phase}_orders": on("second", order)}).sum().backward()
    assert time.time() - sign.stat().st_mtime < BOUND_SECONDS
    thread.join()
    expect_working(model)


def test_a_replica_that_is_killed_while_idle(model):
    out = model(X)
    kill_and_see_it_end(model, 1)
    expect_death(lambda: model(X), "was killed by SIGKILL while it was idle")
    with pytest.raises(RuntimeError, match="have been stopped or have died"):
        out.sum().item()
    with pytest.raises(RuntimeError, match="have been stopped or have died"):
        out.sum().backward()
    expect_working(model)


def test_a_death_is_noticed_by_whoever_uses_rows_that_died_with_it(model):
    out = model(X)
    os.kill(model._team.pids()[0], signal.SIGKILL)
    expect_death(out.full_tensor, "was killed by SIGKILL")
    expect_working(model)


def test_a_replica_that_is_killed_while_it_starts():
    model = DataParallel(Obedient(), device_ids=["cpu"] * 4)  # as nobody else has here
    kill_and_see_it_end(model, 2)
    expect_death(lambda: model(X), "replica 2 .* was killed by SIGKILL while it was starting")
    torch.testing.assert_close(model(X).full_tensor(), model.module(X))


def test_when_one_of_several_replicas_dies_the_others_are_replaced_too(tmp_path):
    model = DataParallel(Obedient(), device_ids=["cpu"] * 3)
    model(X)
    pids = model._team.pids()
    sign = tmp_path / "sign"
    thread = when_exists(sign, lambda: os.kill(pids[0], signal.SIGKILL))
    # Replica 2 waits, and is not the one that dies.
    expect_death(
        lambda: model(X, [0] * 7 + [orders.WAIT], sign=str(sign)),
        "replica 1 .* was killed by SIGKILL while running forward",
        seconds=60,
    )
    assert time.time() - sign.stat().st_mtime < BOUND_SECONDS
    thread.join()
    torch.testing.assert_close(model(X).full_tensor(), model.module(X))
    assert not set(pids) & set(model._team.pids())


# ---------------------------------------------------------------------- Ctrl-C


@pytest.fixture
def ctrl_c_works():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("order", [orders.WAIT, orders.COMPUTE])
@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_in_the_middle_of_a_step_and_going_on_keeps_the_replicas(model, phase, order, tmp_path):
    before, pids = held_by_replica(model), model._team.pids()
    sign = tmp_path / "sign"
    thread = when_exists(sign, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        model(X, sign=str(sign), **{f"{phase}_orders": on("second", order)}).sum().backward()
    thread.join()
    started = time.monotonic()
    expect_working(model)
    assert time.monotonic() - started < BOUND_SECONDS
    assert model._team.pids() == pids
    assert held_by_replica(model) == before
