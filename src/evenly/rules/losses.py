"""Losses. A mean is that of the whole batch, whatever part of it each replica holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from evenly.rules.plan import Call, Cut, Divided, Operand, Parts, Plan, Rows
from evenly.rules.pointwise import align, pointwise

NONE, MEAN, SUM = 0, 1, 2


def _total(rows: Rows, kind: int) -> Parts:
    """What a loss over all rows is made of: sums, or means weighted by their rows."""
    return Parts("sum", rows.shares() if kind == MEAN else None)


def loss(call: Call) -> Plan | None:
    """A loss of pairs of elements."""
    kind = call["reduction"]
    if kind == NONE:
        return pointwise(call)
    found = align(call.operands, broadcast=True)
    return found and call.plan(_total(found.rows, kind), cuts=found.cuts)


def loss_backward(call: Call) -> Plan | None:
    """Gradient of :func:`loss`. A mean divides by the elements of the whole batch, so each replica computes a sum."""
    kind, gradient = call["reduction"], call.operands[0]
    if kind != NONE and gradient.ndim:
        return None
    found = align(call.operands, broadcast=True)
    if found is None:
        return None
    if kind != MEAN:
        return call.plan(found.rows, cuts=found.cuts)
    shapes = [operand.shape for operand in call.operands]
    count = math.prod(cast("tuple[int, ...]", torch.broadcast_shapes(*shapes)))  # pyright: ignore[reportUnknownMemberType]
    return call.plan(found.rows, cuts={**found.cuts, gradient: Divided(gradient, count)}, reduction=SUM)


def _classified(call: Call, *, whole: tuple[str, ...]) -> tuple[Rows, dict[Operand, Any]] | None:
    """Rows of scores and of what belongs to them; arguments named are given whole, and a 0-dim gradient."""
    x, rows = call["self"], call["self"].rows
    if rows is None:
        rows = next(operand.rows for operand in call.operands if operand.rows is not None)
    if rows.dim != 0 or x.ndim < 2:  # noqa: PLR2004 - a single example has no rows
        return None
    shared = [call[name] for name in whole]
    cuts: dict[Operand, Any] = {}
    for operand in call.operands:
        if operand in shared or operand.ndim == 0:
            if operand.rows is not None:
                return None
        elif operand.shape[0] != rows.total or operand.rows not in (None, rows):
            return None
        elif operand.rows is None:
            cuts[operand] = Cut(operand, 0, rows.rows)
    return rows, cuts


def nll(call: Call) -> Plan | None:
    """Negative log likelihood. A mean is a sum over the batch divided by the sum of the weights of the targets."""
    found = _classified(call, whole=("weight",))
    if found is None:
        return None
    (rows, cuts), kind = found, call["reduction"]
    if kind == NONE:
        return call.plan(rows, Parts(), cuts=cuts)
    total = Parts(early=_weight_of_targets(call))
    return call.plan(Parts(over=1 if kind == MEAN else None), total, cuts=cuts, reduction=SUM)


def _weight_of_targets(call: Call) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """What all targets weigh together, if they are on the driver: their number, without class weights."""
    target, weight, ignored, dtype = call["target"], call["weight"], call["ignore_index"], call["self"].dtype
    if target.rows is not None:
        return None
    target_at, weight_at = int(target.position), None if weight is None else int(weight.position)

    def total(operands: Sequence[Tensor]) -> Tensor:
        targets = operands[target_at]
        valid = targets != ignored
        if weight_at is None:
            return valid.sum().to(dtype)
        return (operands[weight_at][targets.where(valid, 0)] * valid).sum().to(dtype)

    return total


def nll_backward(call: Call) -> Plan | None:
    """Gradient of :func:`nll`: the total weight of the whole batch is known by now."""
    found = _classified(call, whole=("weight", "total_weight"))
    gradient, kind = call["grad_output"], call["reduction"]
    if found is None or (kind == NONE) != bool(gradient.ndim):
        return None
    rows, cuts = found
    if kind != MEAN:
        return call.plan(rows, cuts=cuts)
    return call.plan(rows, cuts={**cuts, gradient: Divided(gradient, call["total_weight"])}, reduction=SUM)


def margin(call: Call) -> Plan | None:
    """Margin losses: a number per example from its scores and its target."""
    found = _classified(call, whole=("weight",) if "weight" in call else ())
    if found is None:
        return None
    (rows, cuts), kind = found, call["reduction"]
    value = rows if kind == NONE else _total(rows, kind)
    # The multi-label loss also returns which classes are targets, row by row.
    return call.plan(value, *(rows,) * (call.returns - 1), cuts=cuts)


def margin_backward(call: Call) -> Plan | None:
    """Gradient of :func:`margin`."""
    found = _classified(call, whole=("weight",) if "weight" in call else ())
    gradient, kind = call["grad_output"], call["reduction"]
    if found is None or (kind == NONE) != bool(gradient.ndim):
        return None
    (rows, cuts) = found
    if kind != MEAN:
        return call.plan(rows, cuts=cuts)
    # In a replica the mean is over its own examples: scaled to sum up to that over all.
    return call.plan(rows, cuts={**cuts, gradient: Divided(gradient, rows.total)}, reduction=SUM)
