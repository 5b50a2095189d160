"""Sums, means, extrema, norms: over other dimensions rows stay rows, over the rows each replica has a part."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from evenly.rules.plan import Call, Combine, Operand, Output, Parts, Plan, Rule


def reduction(*over_rows: str) -> Rule:
    """Reduces the dimensions given as ``dim``, all where there are none.

    Args:
        over_rows: How the replicas' results combine, one for each, when the dealt-out dimension is reduced, too: "mean"
            (weighted by rows), "norm" (of the order given as ``ord`` or ``p``) or a key of :data:`COMBINE`. Without,
            it cannot be done in parts.
    """

    def rule(call: Call) -> Plan | None:
        tensor = call.operands[0]
        rows = tensor.rows
        if rows is None or len(call.operands) != 1:
            return None
        wanted = call.get("dim")
        dims = list(range(tensor.ndim)) if wanted is None or wanted == [] else call.dims("dim", tensor.ndim)
        if dims is None:
            return None
        if rows.dim in dims:
            outputs = [_parts(call, tensor, kind) for kind in over_rows]
            return call.plan(*outputs) if outputs and None not in outputs else None
        moved = rows.dim if call.get("keepdim") else rows.dim - sum(d < rows.dim for d in set(dims))
        return call.plan(*(rows.at(moved),) * call.returns)

    return rule


def _parts(call: Call, tensor: Operand, kind: str) -> Output:
    rows = tensor.rows
    if kind == "mean":
        return rows and Parts("sum", rows.shares())
    if kind != "norm":
        return Parts(kind)
    order = call["ord"] if "ord" in call else call["p"]
    return Parts(_norm_of_norms(2.0 if order is None else order))


def _norm_of_norms(order: float) -> Combine:
    """A vector's norm is the norm of the norms of its parts; the number of non-zero elements is a sum."""

    def combine(parts: list[Tensor]) -> Tensor:
        stacked = torch.stack(parts)
        return stacked.sum(0) if order == 0 else cast("Any", torch.linalg).vector_norm(stacked, order, 0)

    return combine
