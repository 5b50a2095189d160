"""What the examples share: the `--devices` option, the progress bar and the table of replicas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import click
import psutil
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Devices(click.ParamType):
    """`cpu:2` is two replicas on the CPU, `cuda:0,1` one on each of two GPUs."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """Turn the user's word into a list of devices, one per replica.

        Raises:
            click.BadParameter: if the word is not understood, or names a device that is not there.
        """
        if isinstance(value, list):
            return value
        if match := re.fullmatch(r"cpu(?::(\d+))?", value):
            replicas = int(match[1] or 1)
            if replicas < 1:
                raise click.BadParameter(f"{value!r} asks for no replica at all: at least cpu:1.", ctx, param)
            return ["cpu"] * replicas
        if match := re.fullmatch(r"cuda:(\d+(?:,\d+)*)", value):
            indices = [int(index) for index in match[1].split(",")]
            present = torch.cuda.device_count()
            if missing := [index for index in indices if index >= present]:
                there = f"has {present} of them" if present else "has none; replicas on the CPU: cpu:2"
                raise click.BadParameter(f"{value!r} names GPU {missing[0]}; this machine {there}.", ctx, param)
            return [f"cuda:{index}" for index in indices]
        raise click.BadParameter(
            f"{value!r} is neither like cpu:2 (two CPU replicas) nor like cuda:0,1 (two GPUs).", ctx, param
        )


devices_option = click.option(
    "--devices",
    type=Devices(),
    default="cpu:2",
    show_default=True,
    help="cpu:2 for two replicas on the CPU, cuda:0,1 for two GPUs; cpu:1 runs the bare model.",
)


def training_progress(unit: str) -> Progress:
    """Make a progress bar whose tasks have the fields `loss` and `speed` (in `unit` per second)."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} " + unit + "/s"),
        TimeElapsedColumn(),
    )


class Replica(Protocol):
    """One line of `DataParallel.report()`."""

    replica: int
    device: Any
    rows: int
    seconds: float
    memory_bytes: int


@dataclass
class Bare:
    """What the bare model used, in the terms of `DataParallel.report()`."""

    device: str
    rows: int
    seconds: float
    replica: int = 0

    @property
    def memory_bytes(self) -> int:
        """Memory of the device at its fullest; on the CPU what this process holds now."""
        if self.device == "cpu":
            return psutil.Process().memory_info().rss
        return torch.cuda.max_memory_allocated(self.device)


def replica_table(replicas: Iterable[Replica]) -> Table:
    """Show how the work was spread: rows, seconds and memory of each replica."""
    table = Table(title="Replicas", title_justify="left")
    table.add_column("replica", justify="right")
    table.add_column("device")
    for heading in ("rows", "seconds", "memory"):
        table.add_column(heading, justify="right")
    for replica in replicas:
        table.add_row(
            str(replica.replica),
            str(replica.device),
            f"{replica.rows:,}",
            f"{replica.seconds:.1f}",
            f"{replica.memory_bytes / 2**20:,.0f} MiB",
        )
    return table
