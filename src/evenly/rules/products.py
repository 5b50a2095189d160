"""Products: rows times a whole matrix stay rows, rows contracted with rows are parts of a sum."""

from __future__ import annotations

from evenly.rules.plan import Call, Cut, Operand, Parts, Plan, Rows
from evenly.rules.pointwise import align


def _product(a: Operand, b: Operand, *, batch: int) -> tuple[Rows | Parts, dict[Operand, Cut]] | None:
    """The result of ``a @ b``, both with ``batch`` batch dimensions in front; vectors have one dimension fewer."""
    left, right = a.rows, b.rows
    contracted_a, contracted_b = a.ndim - 1, batch
    if left is not None and left.dim == contracted_a - 1 == batch and right is None:
        return left, {}
    if right is not None and right.dim == batch + 1 and left is None:
        return right.at(a.ndim - 1), {}
    lead = left or right
    if lead is None:
        return None
    if (left is None or left.dim == contracted_a) and (right is None or right.dim == contracted_b):
        places = {a: contracted_a, b: contracted_b}
        outcome: Rows | Parts = Parts()
    elif lead.dim < batch:
        places = {a: lead.dim, b: lead.dim}
        outcome = lead
    else:
        return None
    cuts: dict[Operand, Cut] = {}
    for operand, dim in places.items():
        if operand.rows is None:
            cuts[operand] = Cut(operand, dim, lead.rows)
        elif operand.rows != lead.at(dim):
            return None
        if operand.shape[dim] != lead.total:
            return None
    return outcome, cuts


def matmul(call: Call) -> Plan | None:
    """``mm``, ``bmm``, ``mv``, ``dot``."""
    a, b = call.operands
    found = _product(a, b, batch=max(0, a.ndim - 2))
    return found and call.plan(found[0], cuts=found[1])


def added_matmul(call: Call) -> Plan | None:
    """``bias + a @ b``: ``addmm``, ``baddbmm``, ``addmv``. A bias cannot be added once per replica."""
    bias, a, b = call.operands
    found = _product(a, b, batch=max(0, a.ndim - 2))
    if found is None:
        return None
    rows, cuts = found
    if isinstance(rows, Parts):
        return None
    ndim = a.ndim + b.ndim - 2 if a.ndim == 2 else a.ndim  # noqa: PLR2004 - a matrix times a matrix or a vector
    dim = rows.dim - (ndim - bias.ndim)
    if bias.rows is not None:
        return call.plan(rows, cuts=cuts) if bias.rows == rows.at(dim) else None
    if dim >= 0 and bias.shape[dim] != 1:
        if bias.shape[dim] != rows.total:
            return None
        cuts = {**cuts, bias: Cut(bias, dim, rows.rows)}
    return call.plan(rows, cuts=cuts)


def outer(call: Call) -> Plan | None:
    """``bias + column * row`` (``addr``): each row needs one number of the column."""
    bias, column, row = call.operands
    rows = column.rows or (bias.rows if bias.rows and bias.rows.dim == 0 else None)
    if rows is None or row.rows is not None or (bias.rows or rows) != rows or column.shape[0] != rows.total:
        return None
    cuts = {column: Cut(column, 0, rows.rows)} if column.rows is None else {}
    if bias.rows is None and bias.ndim == 2 and bias.shape[0] == rows.total:  # noqa: PLR2004 - a matrix
        cuts[bias] = Cut(bias, 0, rows.rows)
    return call.plan(rows, cuts=cuts)


def linear(call: Call) -> Plan | None:
    """Rows through a linear layer outside of the model."""
    x, *others = call.operands
    if x.rows is None or x.rows.dim == x.ndim - 1 or any(operand.rows is not None for operand in others):
        return None
    return call.plan(x.rows)


def distances(call: Call) -> Plan | None:
    """``cdist``: from rows of points to the same points everywhere, or within each row of a batch."""
    a, b = call["x1"], call["x2"]
    if a.ndim != b.ndim:
        return None
    if a.rows is not None and b.rows is None and a.rows.dim == a.ndim - 2:
        return call.plan(a.rows) if a.shape[: a.ndim - 2] == b.shape[: b.ndim - 2] else None
    found = align([a, b], broadcast=False)
    return call.plan(found.rows, cuts=found.cuts) if found and found.rows.dim < found.ndim - 2 else None


def distances_backward(call: Call) -> Plan | None:
    """Gradient of :func:`distances` for the first points: rows, or parts where the rows are the second points'."""
    gradient, a, b, found = call["grad"], call["x1"], call["x2"], call["cdist"]
    if a.ndim != b.ndim or gradient.rows != found.rows or gradient.rows is None:
        return None
    rows = gradient.rows
    points = a.ndim - 2
    if rows.dim == points and a.rows == rows and b.rows is None:
        return call.plan(rows)
    if rows.dim == points + 1 and b.rows == rows.at(points) and a.rows is None:
        return call.plan(Parts())
    return call.plan(rows) if rows.dim < points and a.rows == b.rows == rows else None
