"""By what ``forward`` divides, on each replica: whether that follows the rows, as joining a mean takes for granted.

``F.mse_loss(h[mask], y[mask])`` is a mean over rows for as long as all are selected, and so it looks like one to a
probe of a few rows. Then a batch comes where the replicas select other fractions of their rows, and the mean of their
means is not that of the batch. So every forward notes by what it divides: how many elements a mean is over, or the
divisor of a division. Where that is neither proportional to the replicas' rows nor the same on all, the result is
suspect: what comes of these rows is then tried, as at the first call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

Divisors: TypeAlias = "dict[int, list[float]]"
"""What a forward divided by, in order, by the number of the line of the user's code that did."""

_TOLERANCE = 1e-6  # of sums in single precision


def note(divisors: Divisors, divisor: float) -> None:
    """Add a divisor to those of the line that is running, 0 if it is none of the user's."""
    frame, line = sys._getframe(2), 0
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch":
            line = 0 if package == "evenly" else frame.f_lineno
            break
        frame = frame.f_back
    divisors.setdefault(line, []).append(divisor)


# ---------------------------------------------------------------------- what functions divide by


def _of_mean(input: Tensor, dim: Any = None, *_: Any, axis: Any = None, **__: Any) -> float | None:  # noqa: A002
    """A mean over elements; one that leaves the first dimension as it is leaves the rows apart."""
    dim = axis if dim is None else dim
    dims = (dim,) if isinstance(dim, int) else dim
    if not dims:
        return input.numel()
    if 0 not in dims and -input.dim() not in dims:
        return None
    return math.prod([input.shape[d] for d in dims])


def _of_nanmean(input: Tensor, *_: Any, **__: Any) -> float | None:  # noqa: A002
    return None if _is_transformed(input) else float(input.isnan().logical_not().sum())


def _of_loss(*args: Any, reduction: str = "mean", **kwargs: Any) -> float | None:
    """The elements of its first argument, whatever part of these it divides by."""
    first = args[0] if args else next(iter(kwargs.values()))
    return None if reduction in ("none", "sum") else first.numel()


def _of_division(input: Any, other: Any, **_: Any) -> float | None:  # noqa: A002
    del input
    return _number(other)


def _of_reciprocal(input: Any, *_: Any, **__: Any) -> float | None:  # noqa: A002
    return _number(input)


def _number(value: Any) -> float | None:
    """A divisor that is one number. None for others, and where the number cannot be had without waiting."""
    if isinstance(value, Tensor):
        simple = value.numel() == 1 and value.device.type == "cpu" and not value.is_complex()
        return float(value.detach()) if simple and not _is_transformed(value) else None
    return float(value) if isinstance(value, (int, float)) else None


def _is_transformed(tensor: Tensor) -> bool:
    """Whether it stands for others, as inside of ``torch.vmap``, and has no value of its own."""
    return bool(cast("Any", torch)._C._functorch.is_functorch_wrapped_tensor(tensor))


_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss gaussian_nll_loss hinge_embedding_loss multilabel_margin_loss soft_margin_loss "
    "multilabel_soft_margin_loss multi_margin_loss cosine_embedding_loss margin_ranking_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss ctc_loss"
)


def _table() -> dict[Any, Callable[..., float | None]]:
    table: dict[Any, Callable[..., float | None]] = {getattr(F, name): _of_loss for name in _LOSSES.split()}
    table |= dict.fromkeys([torch.mean, Tensor.mean], _of_mean)
    table |= dict.fromkeys([torch.nanmean, Tensor.nanmean], _of_nanmean)
    for name in ("div", "divide", "true_divide"):
        table |= dict.fromkeys([getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"{name}_")], _of_division)
    table |= dict.fromkeys([torch.reciprocal, Tensor.reciprocal, Tensor.__rdiv__], _of_reciprocal)
    return table


DIVIDES = _table()
"""By the function that a model calls: what tells the divisor from its arguments. None if there is nothing to note."""


# ---------------------------------------------------------------------- whether they follow the rows


class Suspect(NamedTuple):
    """A line that divides by something that does not follow the rows.

    Attributes:
        line: Its number.
        divisors: What it divided by, on each replica.
        replicas: Two of which this can be seen.
    """

    line: int
    divisors: tuple[tuple[float, ...], ...]
    replicas: tuple[int, int]

    def complaint(self, path: str, rows: Sequence[int]) -> str:
        """What is wrong with the value at ``path`` of the output, and what to do."""
        where = f"line {self.line} divides" if self.line else "forward divides"
        each = ", ".join(
            f"{_listed(divisors)} on replica {replica} ({count} rows)"
            for replica, (divisors, count) in enumerate(zip(self.divisors, rows, strict=True))
        )
        return (
            f"{path} is neither the mean nor the sum of what the replicas computed: in forward, {where} (a mean "
            f"divides by how many elements it is over) by {each}, which does not follow the rows, as with a mean over "
            'selected elements. Use reduction="sum" or .sum(), and divide by evenly.whole_batch(count), which is the '
            "count of all replicas"
        )


def suspects(notes: Sequence[Divisors], rows: Sequence[int], usual: Divisors | None = None) -> list[Suspect]:
    """The lines whose divisors are neither proportional to the replicas' rows nor the same on all of them.

    In a loop over rows a line divides as often as there are rows, always by the same.

    Args:
        notes: What each replica divided by.
        rows: Rows of each.
        usual: What the driver divided by the first time. Replicas with different numbers of rows may select equally
            many by chance; that is suspect where the line divided by something else before.
    """
    even = rows[0] == rows[-1]
    if all(other == notes[0] for other in notes[1:]) and (even or usual is None or usual == notes[0]):
        return []
    found: list[Suspect] = []
    for line in sorted({line for divisors in notes for line in divisors}):
        divisors = [divisors.get(line, []) for divisors in notes]
        for replica in range(1, len(rows)):
            constant = usual is None or usual.get(line, divisors[0]) == divisors[0]
            if not _follow(divisors[0], divisors[replica], rows[0], rows[replica], constant=constant):
                found.append(Suspect(line, tuple(map(tuple, divisors)), (0, replica)))
                break
    return found


def _follow(first: list[float], second: list[float], rows: int, other_rows: int, *, constant: bool) -> bool:
    if len(first) != len(second):
        per_row = len(first) * other_rows == len(second) * rows
        return per_row and len({*first, *second}) == 1
    return all(
        (constant and _near(one, other)) or _near(one * other_rows, other * rows)
        for one, other in zip(first, second, strict=True)
    )


def _listed(divisors: Sequence[float], most: int = 4) -> str:
    shown = ", ".join(f"{divisor:g}" for divisor in divisors[:most])
    return (shown or "nothing") + (", ..." if len(divisors) > most else "")


def _near(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
