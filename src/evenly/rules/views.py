"""Views: other shapes of the same memory. Fine as long as every replica's rows stay together."""

from __future__ import annotations

import math
from typing import Any

from evenly.rules.plan import Call, Operand, Plan, Rows, SizeOf, aten
from evenly.rules.pointwise import align


def _view(call: Call, *outputs: Rows, **changes: Any) -> Plan | None:
    return call.plan(*outputs, view=call.function.is_view, **changes)


def _subject(call: Call) -> tuple[Operand, Rows] | None:
    """The tensor to be viewed, and its rows."""
    first = call.first
    return (first, first.rows) if isinstance(first, Operand) and first.rows is not None else None


def reshape(call: Call) -> Plan | None:
    """``view`` and kin: the rows may also be merged with what follows them, or be split into groups."""
    subject = _subject(call)
    if subject is None or not subject[0].numel:
        return None
    tensor, rows = subject
    shape = list(call["size" if "size" in call else "shape"])
    if -1 in shape:
        known = -math.prod(shape)
        if known == 0 or tensor.numel % known:
            return None
        shape[shape.index(-1)] = tensor.numel // known
    before, total, reached = math.prod(tensor.shape[: rows.dim]), rows.total, 1
    for dim, size in enumerate(shape):
        if reached == before and (size != 1 or total == 1):
            if any(count * size % total for count in rows.rows):
                return None
            moved = Rows(dim, tuple(count * size // total for count in rows.rows))
            # `_unsafe_view` does not call itself a view, but is one: PyTorch writes through it.
            return call.plan(moved, view=True, size=[*shape[:dim], -1, *shape[dim + 1 :]])
        reached *= size
    return None


def conjugate(call: Call) -> Plan | None:
    """The complex conjugate, or the negative, as a view.

    PyTorch only notes that it is to be taken, and here nobody would see the note: so it is taken at once.
    """
    subject = _subject(call)
    if subject is None:
        return None
    function = aten._conj_physical.default if call.function is aten._conj.default else aten.neg.default
    return Plan(function, (subject[0],), (subject[1],), view=True, copies=True)


def retyped(call: Call) -> Plan | None:
    """The same bytes as another dtype: the last dimension may change its size."""
    subject = _subject(call)
    return _view(call, subject[1]) if subject and subject[1].dim < subject[0].ndim - 1 else None


def permute(call: Call) -> Plan | None:
    """Dimensions change places."""
    subject = _subject(call)
    order = subject and call.dims("dims", subject[0].ndim)
    if not subject or not order or subject[1].dim not in order:
        return None
    return _view(call, subject[1].at(order.index(subject[1].dim)))


def transpose(call: Call) -> Plan | None:
    """Two dimensions change places."""
    subject = _subject(call)
    if subject is None:
        return None
    tensor, rows = subject
    if call.function is aten.t.default:
        a, b = (0, 1) if tensor.ndim == 2 else (0, 0)  # noqa: PLR2004 - the transpose of a vector is the vector
    else:
        first, second = call.dims("dim0", tensor.ndim), call.dims("dim1", tensor.ndim)
        if first is None or second is None:
            return None
        (a,), (b,) = first, second
    return _view(call, rows.at({a: b, b: a}.get(rows.dim, rows.dim)))


def unsqueeze(call: Call) -> Plan | None:
    """A dimension of size 1 comes in."""
    subject = _subject(call)
    dims = subject and call.dims("dim", subject[0].ndim + 1)
    return _view(call, subject[1].at(subject[1].dim + (dims[0] <= subject[1].dim))) if subject and dims else None


def squeeze(call: Call) -> Plan | None:
    """Dimensions of size 1 go. Said explicitly which: in one replica the rows may happen to be 1."""
    subject = _subject(call)
    if subject is None:
        return None
    tensor, rows = subject
    dims = call.dims("dim", tensor.ndim) if "dim" in call else list(range(tensor.ndim))
    if dims is None:
        return None
    gone = [dim for dim in dims if tensor.shape[dim] == 1]
    if rows.dim in gone:
        return None
    moved = rows.at(rows.dim - sum(dim < rows.dim for dim in gone))
    return Plan(aten.squeeze.dims, (tensor, gone), (moved,), view=True)


def expand(call: Call) -> Plan | None:
    """Dimensions of size 1 grow, new ones come in front."""
    subject = _subject(call)
    if subject is None:
        return None
    tensor, rows = subject
    shape = list(call["size"])
    dim = rows.dim + len(shape) - tensor.ndim
    if dim < 0 or shape[dim] not in (-1, rows.total):
        return None
    shape[dim] = -1
    return _view(call, rows.at(dim), size=shape)


def repeat(call: Call) -> Plan | None:
    """Copies side by side, not of the rows."""
    subject = _subject(call)
    if subject is None:
        return None
    tensor, rows = subject
    dim = rows.dim + len(call["repeats"]) - tensor.ndim
    return call.plan(rows.at(dim)) if dim >= 0 and call["repeats"][dim] == 1 else None


def _gone(rows: Rows, dim: int) -> Rows:
    """The rows when a dimension before or after them has gone."""
    return rows.at(rows.dim - (dim < rows.dim))


def pick(call: Call) -> Plan | None:
    """A piece along another dimension than the rows': ``select``, ``slice``, ``unfold``."""
    subject = _subject(call)
    name = "dimension" if "dimension" in call else "dim"
    dims = subject and call.dims(name, subject[0].ndim)
    if not subject or not dims:
        return None
    rows, dim = subject[1], dims[0]
    if dim != rows.dim:
        return _view(call, _gone(rows, dim) if call.function is aten.select.int else rows)
    if call.function is aten.slice.Tensor and _is_all(call, rows.total):
        return _view(call, rows, start=None, end=None)
    return None


def _is_all(call: Call, total: int) -> bool:
    end = call["end"]
    return call["start"] in (None, 0) and (end is None or end >= total) and call["step"] == 1


def pieces(call: Call) -> Plan | None:
    """All pieces along another dimension than the rows': ``split``, ``unbind``."""
    subject = _subject(call)
    dims = subject and call.dims("dim", subject[0].ndim)
    if not subject or not dims or subject[1].dim == dims[0]:
        return None
    (tensor, rows), dim = subject, dims[0]
    size = tensor.shape[dim]
    if "split_sizes" in call:
        count = len(call["split_sizes"])
    elif "split_size" in call:
        count = max(1, -(-size // max(1, call["split_size"])))
    else:
        return _view(call, *(_gone(rows, dim),) * size) if size else None
    return _view(call, *(rows,) * count)


def diagonal(call: Call) -> Plan | None:
    """The diagonal of two other dimensions becomes the last dimension."""
    subject = _subject(call)
    if subject is None:
        return None
    tensor, rows = subject
    first, second = call.dims("dim1", tensor.ndim), call.dims("dim2", tensor.ndim)
    if first is None or second is None or rows.dim in (first[0], second[0]):
        return None
    return _view(call, rows.at(rows.dim - (first[0] < rows.dim) - (second[0] < rows.dim)))


def stretched(call: Call) -> Plan | None:
    """A complex tensor as real pairs, or back: the last dimension comes or goes."""
    subject = _subject(call)
    if subject is None or (call.function is aten.view_as_complex.default and subject[1].dim == subject[0].ndim - 1):
        return None
    return _view(call, subject[1])


# ---------------------------------------------------------------------- gradients of views


def view_backward(call: Call) -> Plan | None:
    """Gradients of ``select``, ``slice`` and ``diagonal``: that of a piece, among zeros in the shape of all."""
    subject = _subject(call)
    if subject is None:
        return None
    tensor, rows = subject
    sizes = list(call["input_sizes"])
    ndim = len(sizes)
    names = [name for name in ("dim", "dim1", "dim2") if name in call]
    dims = [found[0] for name in names if (found := call.dims(name, ndim))]
    if len(dims) != len(names):
        return None
    # Which dimension of the whole the rows are: those that the view took away come back in front of them.
    removed = sorted(dims) if len(dims) == 2 or "index" in call else []  # noqa: PLR2004 - a diagonal takes two away
    dim = rows.dim
    for gone in removed:
        dim += gone <= dim
    if dim in dims or dim >= ndim or sizes[dim] != rows.total:
        return None
    sizes[dim] = SizeOf(tensor, rows.dim)
    return call.plan(rows.at(dim), input_sizes=sizes)


def scatter_view(call: Call) -> Plan | None:
    """A tensor with a piece of it, along another dimension, replaced: ``select_scatter``, ``slice_scatter``."""
    whole, piece = call.operands
    dims = call.dims("dim", whole.ndim)
    if dims is None or whole.rows is None or whole.rows.dim == dims[0]:
        return None
    expected = _gone(whole.rows, dims[0]) if call.function is aten.select_scatter.default else whole.rows
    if piece.rows != expected:
        return None
    return call.plan(whole.rows)


# ---------------------------------------------------------------------- side by side


def concatenate(call: Call) -> Plan | None:
    """Tensors side by side, along another dimension than the rows'."""
    tensors = call.operands
    found = align(tensors, broadcast=False)
    if found is None or any(tensor.ndim != found.ndim for tensor in tensors):  # `cat` lets empty vectors pass
        return None
    stacks = call.function is aten.stack.default
    dims = call.dims("dim", found.ndim + stacks)
    if dims is None or (not stacks and dims[0] == found.rows.dim):
        return None
    rows = found.rows.at(found.rows.dim + (stacks and dims[0] <= found.rows.dim))
    return call.plan(rows, cuts=found.cuts)
