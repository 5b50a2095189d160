"""Layers outside of the wrapped model: their weights are whole in every replica, so their gradients come in parts."""

from __future__ import annotations

from typing import Any

from evenly.rules.plan import Call, Cut, Operand, Parts, Plan, Rows, SizeOf
from evenly.rules.pointwise import align


def _rows_with_whole(call: Call, whole: tuple[str, ...]) -> tuple[Rows, int, dict[Operand, Any]] | None:
    """Rows of the examples, when all arguments but those named are dealt out along the first dimension."""
    shared = [value for name in whole if isinstance(value := call[name], Operand)]
    if any(operand.rows is not None for operand in shared):
        return None
    found = align([operand for operand in call.operands if operand not in shared], broadcast=False)
    return found and (found.rows, found.ndim, dict(found.cuts))


def normalisation(call: Call) -> Plan | None:
    """Layer norm and RMS norm, and their gradients: over dimensions behind the rows."""
    found = _rows_with_whole(call, ("weight", "bias") if "bias" in call else ("weight",))
    if found is None:
        return None
    rows, ndim, cuts = found
    if rows.dim >= ndim - len(call["normalized_shape"]):
        return None
    if "output_mask" in call:
        return call.plan(*_wanted(call, rows), cuts=cuts)
    return call.plan(*(rows,) * call.returns, cuts=cuts)


def group_norm(call: Call) -> Plan | None:
    """Group norm: the number of examples is an argument, and each replica's own."""
    x = call["input"]
    if x.rows is None or x.rows.dim != 0 or any(operand.rows for operand in call.operands if operand is not x):
        return None
    return call.plan(*(x.rows,) * call.returns, N=SizeOf(x, 0))


def group_norm_backward(call: Call) -> Plan | None:
    """Gradient of :func:`group_norm`."""
    whole = call["weight"]
    aligned = [operand for operand in call.operands if operand is not whole]
    rows = next(operand.rows for operand in call.operands if operand.rows is not None)
    if any(operand.rows is not None and operand.rows != rows for operand in call.operands) or rows.dim != 0:
        return None
    if whole is not None and whole.rows is not None:
        return None
    if any(operand.shape[0] != rows.total for operand in aligned):
        return None
    cuts = {operand: Cut(operand, 0, rows.rows) for operand in aligned if operand.rows is None}
    lead = next(operand for operand in aligned if operand.rows is not None)
    return call.plan(*_wanted(call, rows), cuts=cuts, N=SizeOf(lead, 0))


def _wanted(call: Call, rows: Rows) -> list[Rows | Parts | None]:
    """Gradients of the input, the weight and the bias, as far as somebody wants them."""
    kinds = (rows, Parts(), Parts())
    return [kind if wanted else None for kind, wanted in zip(kinds, call["output_mask"], strict=False)]


def convolution(call: Call) -> Plan | None:
    """Examples through a convolution."""
    found = _rows_with_whole(call, ("weight", "bias"))
    return call.plan(found[0], cuts=found[2]) if found and found[0].dim == 0 else None


def convolution_backward(call: Call) -> Plan | None:
    """Gradient of :func:`convolution`."""
    found = _rows_with_whole(call, ("weight",))
    return call.plan(*_wanted(call, found[0]), cuts=found[2]) if found and found[0].dim == 0 else None
