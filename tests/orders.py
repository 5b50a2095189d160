"""A model that does what its rows tell it to: fail, die, wait. Only the shards that hold such a row do.

Running out of memory takes four rows, so that half of a batch of eight has room.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from evenly import DataParallel
from evenly.team.presence import inside_replica

BOUND_SECONDS = 2.0
"""Within this a death must be known, and everything gone after the driver's own."""

FAIL, FAIL_WITH_TWO_ARGUMENTS, OUT_OF_MEMORY, KILL, CRASH, WAIT, COMPUTE, LEAVE = range(1, 9)


class ShapeError(ValueError):
    """Takes two arguments, and keeps none of them as they are."""

    def __init__(self, want: int, got: int) -> None:
        super().__init__(f"want {want}, got {got}")
        self.want, self.got = want, got


def obey(order: int, rows: int, sign: str) -> None:
    """Do what a row says; ``sign`` is a file to make when a long wait begins."""
    if order == FAIL:
        raise ZeroDivisionError("as ordered")
    if order == FAIL_WITH_TWO_ARGUMENTS:
        raise ShapeError(3, 4)
    if order == OUT_OF_MEMORY and rows == 4:
        raise MemoryError(f"no room for {rows} rows")
    if order == KILL and inside_replica():
        os.kill(os.getpid(), signal.SIGKILL)
    if order == CRASH and inside_replica():
        ctypes.string_at(0)
    if order == LEAVE and inside_replica():
        os._exit(3)
    if order == WAIT and inside_replica():
        Path(sign).touch()
        time.sleep(600)
    if order == COMPUTE and inside_replica():
        Path(sign).touch()
        while True:
            torch.ones(10) + 1


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, orders: list[int], sign: str) -> Tensor:
        ctx.orders, ctx.sign = orders, sign
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        for order in ctx.orders:
            obey(order, len(gradient), ctx.sign)
        return gradient, None, None


class Obedient(nn.Module):
    """A linear layer; ``forward_orders`` and ``backward_orders`` have one entry per row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(
        self,
        x: Tensor,
        forward_orders: list[int] | None = None,
        backward_orders: list[int] | None = None,
        sign: str = "",
    ) -> Tensor:
        for order in forward_orders or ():
            obey(order, len(x), sign)
        return _Backward.apply(self.linear(x), backward_orders or [], sign)


X = torch.arange(24.0).view(8, 3) / 24


def on(shards: str, order: int) -> list[int]:
    """Orders for eight rows on two replicas: to "first", "second" or "both" shards."""
    orders = [0] * 8
    if shards in ("first", "both"):
        orders[1] = order
    if shards in ("second", "both"):
        orders[6] = order
    return orders


def expect_working(model: DataParallel) -> None:
    """A whole step must give what the bare module gives."""
    model.zero_grad()
    model(X).square().mean().backward()
    bare = Obedient()
    bare.load_state_dict(model.state_dict())
    bare(X).square().mean().backward()
    for (name, wanted), (_, found) in zip(bare.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)


def when_exists(sign: Path, action: Callable[[], None]) -> threading.Thread:
    """Start a thread that acts as soon as a file exists."""

    def wait() -> None:
        wait_for(sign.exists)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Return once a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {seconds} s in vain"
        time.sleep(0.005)


def living(processes):
    """Those that have not ended; one that nobody has waited for yet has."""
    found = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
