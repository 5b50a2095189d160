"""Element by element, and along dimensions that are not dealt out: each replica does its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evenly.rules.plan import Call, Cut, Operand, Output, Plan, Rows, Rule, SizeOf

_STRIDED = torch.strided


@dataclass(slots=True)
class Alignment:
    """Operands fitted to each other's rows.

    Attributes:
        rows: Where the rows are in a result of ``ndim`` dimensions.
        cuts: What stands in the place of plain operands that are dealt out.
    """

    rows: Rows
    ndim: int
    cuts: dict[Operand, Cut]


def align(operands: Sequence[Operand], *, broadcast: bool) -> Alignment | None:
    """Fit operands to the rows of the sharded ones; None if they do not fit."""
    ndim = max(operand.ndim for operand in operands)
    lead: Rows | None = None
    back = 0  # the dealt-out dimension, counted from the end, where broadcasting aligns
    for operand in operands:
        rows = operand.rows
        if rows is None:
            continue
        position = operand.ndim - rows.dim
        if lead is None:
            lead, back = rows, position
        elif position != back or rows.rows != lead.rows:
            return None
    if lead is None:
        return None
    total = lead.total
    cuts: dict[Operand, Cut] = {}
    for operand in operands:
        if operand.rows is not None:
            continue
        dim = operand.ndim - back
        if dim >= 0 and operand.shape[dim] == total and (broadcast or operand.ndim == ndim):
            cuts[operand] = Cut(operand, dim, lead.rows)
        elif not (broadcast and (dim < 0 or operand.shape[dim] == 1)):
            return None
    return Alignment(lead.at(ndim - back), ndim, cuts)


def examples(operands: Sequence[Operand]) -> tuple[Rows, dict[Operand, Cut]] | None:
    """Deal out operands of any number of dimensions along the first one; None if it does not fit all of them."""
    rows = next((operand.rows for operand in operands if operand.rows is not None), None)
    if rows is None or rows.dim != 0:
        return None
    if any(operand.ndim == 0 or operand.shape[0] != rows.total for operand in operands):
        return None
    if any(operand.rows not in (None, rows) for operand in operands):
        return None
    return rows, {operand: Cut(operand, 0, rows.rows) for operand in operands if operand.rows is None}


def wanted(call: Call, *outputs: Output) -> list[Output]:
    """``outputs``, without those gradients that nobody wants."""
    if "output_mask" not in call:
        return list(outputs)
    return [output if asked else None for output, asked in zip(outputs, call["output_mask"], strict=False)]


def pointwise(call: Call) -> Plan | None:
    """Element by element, with broadcasting."""
    found = align(call.operands, broadcast=True)
    return found and call.plan(*(found.rows,) * call.returns, cuts=found.cuts)


def kept(
    along: str | None = None,
    *,
    trailing: int | Callable[[Call], int] = 0,
    whole: Sequence[str] = (),
    batch_first: bool = False,
) -> Rule:
    """Works along other dimensions than that of the rows and leaves them where they are. No broadcasting.

    Args:
        along: The argument that says along which dimensions: softmax, cumsum, sort, gather, flip …
        trailing: It works on so many last dimensions: pooling, padding, matrices …
        whole: Arguments that are given whole to every replica: weights, boundaries, an index.
        batch_first: The rows must be the first dimension.
    """

    def rule(call: Call) -> Plan | None:
        shared = [value for name in whole if isinstance(value := call[name], Operand)]
        if any(operand.rows is not None for operand in shared):
            return None
        found = align([operand for operand in call.operands if operand not in shared], broadcast=False)
        if found is None:
            return None
        rows, ndim = found.rows, found.ndim
        if along is not None:
            dims = call.dims(along, ndim) if call[along] is not None else None
            if not dims or rows.dim in dims:
                return None
        last = trailing if isinstance(trailing, int) else trailing(call)
        if rows.dim >= ndim - last or (batch_first and rows.dim != 0):
            return None
        return call.plan(*wanted(call, *(rows,) * call.returns), cuts=found.cuts)

    return rule


def first_only(call: Call) -> Plan | None:
    """Element by element over the first operand; the others are tables that every replica is given whole."""
    first, *others = call.operands
    if first.rows is None or any(operand.rows is not None for operand in others):
        return None
    return call.plan(first.rows)


def looked_up(call: Call) -> Plan | None:
    """``searchsorted``: every element by itself in a sequence that every replica is given whole."""
    sequence, first = call["sorted_sequence"], call["self"]
    if first.rows is None or sequence.ndim != 1 or any(o.rows is not None for o in call.operands if o is not first):
        return None
    return call.plan(first.rows)


def converted(call: Call) -> Plan | None:
    """A copy of another dtype or layout in memory, here; to another device or sparse it goes as a whole."""
    first = call.operands[0]
    same_place = call["device"] in (None, first.device) and call["layout"] in (None, _STRIDED)
    return pointwise(call) if same_place else None


def factory(call: Call) -> Plan | None:
    """``new_zeros`` and kin: as the rows of the tensor that asks, if the new one has as many in the same place."""
    first = call.operands[0]
    size = list(call["size"])
    rows = first.rows
    if rows is None or call["device"] not in (None, first.device) or call["layout"] not in (None, _STRIDED):
        return None
    if rows.dim >= len(size) or size[rows.dim] != rows.total:
        return None
    size[rows.dim] = SizeOf(first, rows.dim)
    return call.plan(rows, size=size)
