"""The results as a picture: bars with spread for each workload, and how costs grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from growth import Points
from processes import KINDS
from results import LEAST_OF_LIMIT, Results
from turns import Spread, Turns

_COLOURS = {
    "limit": "#3a3f47",
    "evenly": "#d1495b",
    "ddp": "#2e6f95",
    "threads": "#8fb8d0",
    "bare1": "#c9c9c4",
    "bare": "#9a9a94",
}
_LABELS = {
    "evenly": "evenly",
    "ddp": "DDP (gloo)",
    "threads": "threads, as nn.DataParallel",
    "bare1": "one process, one thread",
    "bare": "one process, all threads",
}
_TARGET = "target for evenly"
_HIGHEST = 2.0
"""Bars beyond are cut off."""
_LINES = ("#d1495b", "#edae49", "#2e6f95", "#66a182")
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8a8a",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e8e8e4",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def draw(results: Results, path: Path) -> None:
    """Write the picture."""
    panels = [panel for panel, there in _panels(results) if there]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(12, 4.6 + (3.8 if panels else 0)), layout="constrained")
        grid = figure.add_gridspec(
            2 if panels else 1, max(1, len(panels)), height_ratios=[1.2, 1][: 2 if panels else 1]
        )
        _bars(figure.add_subplot(grid[0, :]), results)
        for column, panel in enumerate(panels):
            panel(figure.add_subplot(grid[1, column]))
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
        figure.savefig(path, dpi=150)


def _panels(results: Results) -> list[tuple[Callable[[Axes], None], object]]:
    return [
        (lambda axes: _by_replicas(axes, results), results.by_replicas),
        (lambda axes: _by_parameters(axes, results), results.by_parameters),
        (lambda axes: _by_tensors(axes, results.by_tensors), results.by_tensors),
    ]


def _bars(axes: Axes, results: Results) -> None:
    """Throughput of every contender as a fraction of the limit's, per workload."""
    turns = {workload: found for workload, found in results.turns.items() if "limit" in found.milliseconds}
    names = [name for name in KINDS if name in _LABELS and all(name in found.milliseconds for found in turns.values())]
    width = min(0.84 / max(1, len(names)), 0.25)
    for index, name in enumerate(names):
        spreads = [found.throughput(name, "limit") for found in turns.values()]
        places = [workload + (index - (len(names) - 1) / 2) * width for workload in range(len(turns))]
        heights = [spread.median for spread in spreads]
        axes.bar(places, heights, width * 0.92, color=_COLOURS[name], label=_LABELS[name])
        axes.errorbar(places, heights, _error(spreads), fmt="none", ecolor="#222222", elinewidth=1, capsize=2)
        if name == "evenly":
            _values(axes, places, heights)
            _targets(axes, list(turns), places, width)
    axes.axhline(1, color=_COLOURS["limit"], linewidth=1.2)
    axes.set_xticks(range(len(turns)), list(turns))
    axes.tick_params(axis="x", length=0, labelsize=11)
    axes.set_xlim(-0.55, len(turns) - 0.45)
    axes.set_ylim(0, min(_HIGHEST, max(1.2, axes.get_ylim()[1])))
    axes.set_title(
        f"Throughput with {results.replicas} replicas; 1 = {results.replicas} processes that do not communicate",
        fontweight="bold",
    )
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: labels[index] == _TARGET)
    axes.legend(
        [handles[i] for i in order], [labels[i] for i in order],
        loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(order), handlelength=1.3,
    )  # fmt: skip


def _values(axes: Axes, places: list[float], heights: list[float]) -> None:
    """Numbers at the foot of the bars, where no spread or target is; above those that are too short for it."""
    for place, height in zip(places, heights, strict=True):
        inside = height > 0.2
        axes.text(
            place, 0.03 if inside else height + 0.05, f"{height:.2f}", ha="center", va="bottom", fontsize=9,
            fontweight="bold", color="white" if inside else _COLOURS["evenly"],
        )  # fmt: skip


def _targets(axes: Axes, workloads: list[str], places: list[float], width: float) -> None:
    label = _TARGET
    for workload, place in zip(workloads, places, strict=True):
        if workload in LEAST_OF_LIMIT:
            ends = (place - width / 2, place + width / 2)
            axes.plot(ends, [LEAST_OF_LIMIT[workload]] * 2, color="black", linewidth=1.6, linestyle=":", label=label)
            label = "_"


def _by_replicas(axes: Axes, results: Results) -> None:
    for colour, (workload, points) in zip(_LINES, results.by_replicas.items(), strict=False):
        _line(axes, points, lambda turns: turns.throughput("evenly", "limit"), colour, workload)
    axes.axhline(1, color=_COLOURS["limit"], linewidth=1)
    counts = sorted({count for points in results.by_replicas.values() for count in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, list(map(str, counts)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("replicas")
    axes.set_title("evenly / limit, by number of replicas")
    axes.legend()


def _by_parameters(axes: Axes, results: Results) -> None:
    points = results.by_parameters
    for name in ("evenly", "ddp"):
        _line(axes, points, lambda turns, name=name: turns.throughput(name, "limit"), _COLOURS[name], _LABELS[name])
    axes.axhline(1, color=_COLOURS["limit"], linewidth=1)
    _log_ticks(axes, points)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("million parameters")
    axes.set_title("Throughput / limit, by size of the model")
    axes.legend()


def _by_tensors(axes: Axes, points: Points) -> None:
    for name in ("evenly", "ddp"):
        _line(axes, points, lambda turns, name=name: turns.excess(name, "bare1"), _COLOURS[name], _LABELS[name])
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_xlabel("parameter tensors")
    axes.set_title("Milliseconds beyond bare, by tensors")
    axes.legend()


def _line(axes: Axes, points: Points, figure: Callable[[Turns], Spread], colour: str, label: str) -> None:
    spreads = [figure(turns) for turns in points.values()]
    medians = [spread.median for spread in spreads]
    axes.errorbar(
        list(points), medians, _error(spreads), color=colour, label=label,
        marker="o", markersize=4, capsize=2, linewidth=1.6,
    )  # fmt: skip


def _log_ticks(axes: Axes, points: Points) -> None:
    axes.set_xscale("log")
    axes.set_xticks(list(points))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _error(spreads: list[Spread]) -> list[list[float]]:
    """How far the quartiles are below and above the medians."""
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
