"""Ctrl-C at any moment of a step: the loop goes on afterwards, and computes what it would have computed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import final

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import REPLICAS, compare, wrap

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(7) % 3


class Net(nn.Module):
    """Computes its loss in ``forward``, if it is given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y=None):
        self.calls += 1
        out = self.layers(x)
        return out if y is None else F.cross_entropy(out, y)


def loss_outside(model):
    return F.cross_entropy(model(X), Y)


def loss_inside(model):
    return model(X, Y)


def step(model, loss):
    model.zero_grad()
    value = loss(model)
    value.backward()
    return value, [parameter.grad for parameter in model.parameters()]


@final
class CtrlC:
    """Raises KeyboardInterrupt where Python itself looks for signals, at the ``moment``-th call or end of a call.

    Args:
        moment: From 1 on; 0 only counts.
        files: The files whose moments count; all by default.
    """

    def __init__(self, moment: int = 0, files: tuple[str, ...] = ()) -> None:
        self.moment = moment
        self.files = files
        self.seen = 0
        self.where = ""

    def __enter__(self) -> CtrlC:
        sys.setprofile(self._happen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _happen(self, frame, event, what) -> None:
        if event not in ("call", "c_return") or self.where:
            return
        if self.files and Path(frame.f_code.co_filename).name not in self.files:
            return
        if frame.f_code.co_filename == __file__ and frame.f_code.co_name == "__exit__":
            return
        self.seen += 1
        if self.seen == self.moment:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name} ({event} {what})"
            raise KeyboardInterrupt


def interrupt(model, loss, stride, monkeypatch, files=()):
    """Interrupt a step at every ``stride``-th moment, each time followed by one that is whole."""
    lost: list[str] = []
    # Python cannot raise what happens in a destructor: it says so, and goes on.
    monkeypatch.setattr(sys, "unraisablehook", lambda args: lost.append(repr(args.exc_value)))
    bare = Net()
    bare.load_state_dict(model.state_dict())
    expected = step(bare, loss)
    # Some steps have more moments than others: they tell replicas what is no longer needed, or build a group.
    moments = min(_moments(lambda: step(model, loss), files) for _ in range(5))
    raised = 0
    for moment in range(1, moments, stride):
        lost.clear()
        ctrl_c = CtrlC(moment, files)
        try:
            with ctrl_c:
                step(model, loss)
        except KeyboardInterrupt:
            raised += 1
        else:
            assert lost or not ctrl_c.where, ctrl_c.where
        compare(step(model, loss), expected, f"after {ctrl_c.where}: ")
        assert torch.overrides._len_torch_function_stack() == 0, ctrl_c.where
        assert torch.is_grad_enabled(), ctrl_c.where
        assert torch.get_num_threads() == 1, ctrl_c.where
        _expect_free(model._team.lock, ctrl_c.where)
    assert raised > moments / stride / 2


def _moments(act, files):
    with CtrlC(files=files) as counted:
        act()
    return counted.seen


def _expect_free(lock, where):
    """Whether another thread could use the model now."""
    taken = []
    thread = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=5)) or (taken[0] and lock.release()))
    thread.start()
    thread.join()
    assert taken == [True], where


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loss", [loss_outside, loss_inside], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_loop_that_catches_ctrl_c_at_any_moment_goes_on_with_the_right_numbers(replicas, loss, monkeypatch):
    interrupt(wrap(Net(), replicas), loss, 11, monkeypatch)


@pytest.mark.timeout(300)
def test_ctrl_c_leaves_no_mode_behind_that_watches_torchs_functions(monkeypatch):
    """It would have losses outside of the model normalised as if they were computed on a shard."""
    files = ("batchwide.py", "overrides.py", "contextlib.py", "exchange.py", "context.py")
    interrupt(wrap(Net(), 2), loss_inside, 1, monkeypatch, files)
