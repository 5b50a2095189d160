"""Where a step's time goes: labels in the code, seen by PyTorch's profiler.

The library labels its phases `evenly.…`, the loop its lines. Which labels there are, and which lies within which, is
read from the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

_LOOP = ("step", "zero_grad", "forward", "loss", "backward", "optimizer")


def profile(step: Callable[[Tensor, Tensor], None], batches: Sequence[tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
    """Run `step` on each batch.

    Returns:
        In the order of a step, for each phase its `path` (the labels around it and its own), the mean microseconds
        of a step that it takes (`total`), and those of them that no phase within it accounts for (`self`).
    """
    with torch_profile(activities=[ProfilerActivity.CPU]) as trace:
        for x, y in batches:
            step(x, y)
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    events = [event for event in trace.events() if _is_label(event.name)]
    for event in sorted(events, key=lambda event: event.time_range.start):
        path = _path(event)
        phase = found.setdefault(path, {"path": list(path), "total": 0.0, "self": 0.0})
        took = event.time_range.elapsed_us() / len(batches)
        phase["total"] += took
        phase["self"] += took
        if path[:-1] in found:
            found[path[:-1]]["self"] -= took
    return sorted(found.values(), key=lambda phase: _order(phase["path"], list(found)))


def _is_label(name: str) -> bool:
    return name.startswith("evenly.") or name in _LOOP


def _path(event: Any) -> tuple[str, ...]:
    """The labels around an event and its own, outermost first."""
    labels: list[str] = []
    while event is not None:
        if _is_label(event.name):
            labels.insert(0, event.name)
        event = event.cpu_parent
    return tuple(labels)


def _order(path: Sequence[str], seen: list[tuple[str, ...]]) -> list[int]:
    """Sorts a phase behind the one that it lies in, and otherwise by first appearance."""
    return [seen.index(tuple(path[: depth + 1])) for depth in range(len(path))]
