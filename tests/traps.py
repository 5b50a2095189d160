"""A model that has a replica's next collective go wrong, and a transport of the tests' own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenly.team import presence
from evenly.team.collectives import ThroughGroup
from evenly.team.group import Gloo
from evenly.team.holding import OwnHolding
from evenly.team.transports import TRANSPORTS, Transport


def _act(what: str, sign: str) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "wait":
        Path(sign).touch()
        time.sleep(600)
    elif what == "fail":
        raise ZeroDivisionError("as ordered")


def _arm(where: str, what: str, sign: str, after: int) -> None:
    """Have this process do something instead of its part in a collective, once ``after`` of them went well."""
    usual, count = getattr(Gloo, where), 0

    def trapped(self: Gloo, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count <= after:
            return usual(self, *args)
        setattr(Gloo, where, usual)
        if what == "die in the middle":
            usual(self, *args)
            _act("die", sign)
        _act(what, sign)
        return usual(self, *args)

    setattr(Gloo, where, trapped)


class Trapped(nn.Module):
    """A linear layer and a heavy one; the trap is armed in the last replica when the module arrives there."""

    def __init__(self, where: str = "", what: str = "", sign: object = "", after: int = 0, replica: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.heavy = nn.Linear(1000, 1000)  # 4 MB: more than a socket takes at once
        self.trap = (where, what, str(sign), after) if where else None
        self.replica = replica

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.trap is not None and presence._index == self.replica:
            _arm(*self.trap)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.heavy.weight.mean()


class CountingGroup(Gloo):
    """Counts, in this process."""

    collectives = 0

    def start_reduce(self, group: Any, flat: Tensor) -> Any:
        CountingGroup.collectives += 1
        return super().start_reduce(group, flat)


class Told(nn.Module):
    """Knows of the transport "toy" wherever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


TRANSPORTS["toy"] = Transport(ThroughGroup, OwnHolding, CountingGroup)

X = torch.arange(24.0).view(8, 3) / 24
