"""All teams of this process: one per list of devices, for all models on them, until the last of these is gone."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenly.team.process import stop_all
from evenly.team.team import STOP_SECONDS, Team

if TYPE_CHECKING:
    import torch

_teams: weakref.WeakValueDictionary[tuple[torch.device, ...], Team] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def team_for(devices: Sequence[torch.device]) -> Team:
    """The team of these devices: the one that other models use already, or a new one (not started yet)."""
    key = tuple(devices)
    with _lock:
        team = _teams.get(key)
        if team is None:
            team = _teams[key] = Team(key)
            # At exit `shutdown` does it, with the lock.
            weakref.finalize(team, stop_all, team._processes, os.getpid(), STOP_SECONDS).atexit = False  # pyright: ignore[reportPrivateUsage]
        return team


@atexit.register
def shutdown() -> None:
    """Stop the replicas of all teams. A model that is called afterwards starts new ones."""
    for team in list(_teams.values()):
        # What a thread still waits for is left alone: the replicas end with this process in any case.
        if team.lock.acquire(timeout=STOP_SECONDS):
            try:
                team.stop()
            finally:
                team.lock.release()


def _after_fork() -> None:
    """In a forked child (a DataLoader's worker): the replicas belong to the parent; forget them without a word."""
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    for team in list(_teams.values()):
        team.disown()
    _teams.clear()


os.register_at_fork(after_in_child=_after_fork)
