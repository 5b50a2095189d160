"""Layers outside of the wrapped model: their weights are whole in every replica, so their gradients come in parts."""

from __future__ import annotations

from typing import Any

from evenly.rules.plan import Call, Operand, Parts, Plan, Rows, SizeOf
from evenly.rules.pointwise import align, examples, wanted


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
        return call.plan(*wanted(call, rows, Parts(), Parts()), cuts=cuts)
    return call.plan(*(rows,) * call.returns, cuts=cuts)


def group_norm(call: Call) -> Plan | None:
    """Group norm: the number of examples is an argument, and each replica's own."""
    x = call["input"]
    if x.rows is None or x.rows.dim != 0 or any(operand.rows for operand in call.operands if operand is not x):
        return None
    return call.plan(*(x.rows,) * call.returns, N=SizeOf(x, 0))


def group_norm_backward(call: Call) -> Plan | None:
    """Gradient of :func:`group_norm`."""
    weight, gradient = call["weight"], call["grad_out"]
    found = examples([operand for operand in call.operands if operand is not weight])
    if found is None or (weight is not None and weight.rows is not None):
        return None
    rows, cuts = found
    cut = cuts.get(gradient)
    own = SizeOf(gradient if cut is None else cut, 0)
    return call.plan(*wanted(call, rows, Parts(), Parts()), cuts=cuts, N=own)


def convolution(call: Call) -> Plan | None:
    """Examples through a convolution."""
    found = _rows_with_whole(call, ("weight", "bias"))
    return call.plan(found[0], cuts=found[2]) if found and found[0].dim == 0 else None


def convolution_backward(call: Call) -> Plan | None:
    """Gradient of :func:`convolution`."""
    found = _rows_with_whole(call, ("weight",))
    if found is None or found[0].dim != 0:
        return None
    return call.plan(*wanted(call, found[0], Parts(), Parts()), cuts=found[2])


def attention(call: Call) -> Plan | None:
    """Scaled dot product attention: every example of the batch by itself."""
    found = examples(call.operands)
    return found and call.plan(*(found[0],) * call.returns, cuts=found[1])


def resized_backward(call: Call) -> Plan | None:
    """Gradient of an interpolation: the number of examples is an argument, and each replica's own."""
    gradient = call["grad_output"]
    if gradient.rows is None or gradient.rows.dim != 0:
        return None
    return call.plan(gradient.rows, input_size=[SizeOf(gradient, 0), *call["input_size"][1:]])
