"""What tests must not leave behind: child processes, open file descriptors, files in `/dev/shm`."""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# How long something may take to go: a killed process to be reaped, a closed pipe's thread to notice.
GRACE_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True)
class Footprint:
    """What this process holds of the machine at one moment."""

    children: dict[tuple[int, float], str]
    descriptors: dict[int, str]
    shared_files: frozenset[str]

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        return cls(_children(), _descriptors(), _shared_files())

    def leaks_since(self, before: Footprint) -> list[str]:
        """Name everything that is here and was not there before."""
        leaks = [f"process {what}" for child, what in self.children.items() if child not in before.children]
        # A number may have been closed and opened again as something else: that leaks nothing.
        if len(self.descriptors) > len(before.descriptors):
            leaks += [
                f"file descriptor {number}: {target}"
                for number, target in self.descriptors.items()
                if before.descriptors.get(number) != target
            ]
        return leaks + [f"file {SHARED_MEMORY / name}" for name in sorted(self.shared_files - before.shared_files)]


def leaks_since(before: Footprint, grace_seconds: float = GRACE_SECONDS) -> list[str]:
    """Name what is left over since `before`, once it had time to go by itself."""
    deadline = time.monotonic() + grace_seconds
    while (leaks := Footprint.now().leaks_since(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return leaks


def _children() -> dict[tuple[int, float], str]:
    """Describe the living and the unreaped descendants; a pid may return, with its start time it does not."""
    found = {}
    for child in psutil.Process().children(recursive=True) + replicas_from(nursery().pid if nursery() else 0):
        try:
            with child.oneshot():
                status = child.status()
                command = child.name() if status == psutil.STATUS_ZOMBIE else " ".join(child.cmdline())
                found[child.pid, child.create_time()] = f"{child.pid} ({status}): {command}"
        except psutil.NoSuchProcess:
            continue
    return found


def nursery() -> Any:
    """What replicas of this process are forked from, or None: it stays as long as this process."""
    module = sys.modules.get("evenly.team.nursery")
    return module and module._nursery


def replicas_from(nursery_pid: int) -> list[psutil.Process]:
    """Find what a nursery has forked, which is none of the driver's children."""
    try:
        return psutil.Process(nursery_pid).children(recursive=True) if nursery_pid else []
    except psutil.NoSuchProcess:
        return []


def _descriptors() -> dict[int, str]:
    line = nursery()._line if nursery() else -1
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if int(link.name) != line:
                found[int(link.name)] = str(link.readlink())
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
    return found


def _shared_files() -> frozenset[str]:
    """List what this user has in shared memory; what others have there is none of our business."""
    found = set()
    for file in SHARED_MEMORY.iterdir():
        try:
            if file.stat().st_uid == os.getuid():
                found.add(file.name)
        except FileNotFoundError:
            continue
    return frozenset(found)
