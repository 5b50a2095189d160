"""Picking by index, and putting back."""

from __future__ import annotations

import torch

from evenly.rules.plan import Call, Cut, Operand, Parts, Plan, Rows
from evenly.rules.pointwise import align


def _index_output(rows: Rows, indices: list[Operand | None]) -> Rows | None:
    """Where the rows are after indexing other dimensions; None if the rows are indexed, too, or by a mask."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    found = [index for index in indices if index is not None]
    if not used or rows.dim in used:
        return None
    if any(index.rows is not None or index.dtype in (torch.bool, torch.uint8) for index in found):
        return None
    new = max(index.ndim for index in found)
    side_by_side = used[-1] - used[0] + 1 == len(used)
    before = sum(dim < rows.dim for dim in used)
    moved = rows.dim - before
    # Dimensions that come from the indices stand where the indexed ones stood, or in front if those were apart.
    return rows.at(moved + new if not side_by_side or used[0] < rows.dim else moved)


def index(call: Call) -> Plan | None:
    """``x[:, i, j]``: by indices that every replica uses alike."""
    tensor = call.operands[0]
    moved = tensor.rows and _index_output(tensor.rows, list(call["indices"]))
    return call.plan(moved) if moved else None


def index_put(call: Call) -> Plan | None:
    """``x[:, i, j] = values``, ``x[mask] = number`` where the mask has rows, too."""
    tensor, values, indices = call["self"], call["values"], list(call["indices"])
    rows = tensor.rows
    if rows is None or not all(isinstance(i, Operand) or i is None for i in indices):
        return None
    if values.numel == 1 and values.rows is None and len(indices) == 1 and indices[0] is not None:
        mask = indices[0]
        if mask.dtype is not torch.bool or mask.ndim <= rows.dim or mask.shape != tensor.shape[: mask.ndim]:
            return None
        if mask.rows is None:
            return call.plan(rows, cuts={mask: Cut(mask, rows.dim, rows.rows)})
        return call.plan(rows) if mask.rows == rows else None
    moved = _index_output(rows, indices)
    if moved is None:
        return None
    # Values broadcast from the right to what indexing would give.
    new = max(i.ndim for i in indices if i is not None)
    ndim = tensor.ndim - sum(i is not None for i in indices) + new
    dim = moved.dim - (ndim - values.ndim)
    if values.rows is not None:
        return call.plan(rows) if values.rows == moved.at(dim) else None
    if dim < 0 or values.shape[dim] == 1:
        return call.plan(rows)
    return call.plan(rows, cuts={values: Cut(values, dim, rows.rows)})


def along_index(call: Call) -> Plan | None:
    """``index_add`` and kin: along another dimension, by an index that every replica uses alike."""
    index = call["index"]
    found = align([operand for operand in call.operands if operand is not index and operand.ndim], broadcast=False)
    if found is None or index.rows is not None:
        return None
    dims = call.dims("dim", found.ndim)
    if dims is None or found.rows.dim in dims:
        return None
    return call.plan(found.rows, cuts=found.cuts)


def embedding(call: Call) -> Plan | None:
    """Rows of ids look up a table that every replica has."""
    ids = call["indices"]
    return call.plan(ids.rows) if ids.rows is not None and call["weight"].rows is None else None


def embedding_backward(call: Call) -> Plan | None:
    """Each replica's ids have their part of the table's gradient."""
    gradient, ids = call["grad_output"], call["indices"]
    rows = ids.rows or gradient.rows
    if call["scale_grad_by_freq"] or (gradient.rows or rows) != rows:
        return None
    cuts: dict[Operand, Cut] = {
        operand: Cut(operand, rows.dim, rows.rows) for operand in (gradient, ids) if operand.rows is None
    }
    if rows.dim >= ids.ndim or {gradient.shape[rows.dim], ids.shape[rows.dim]} != {rows.total}:
        return None
    return call.plan(Parts(), cuts=cuts)
