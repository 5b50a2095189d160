"""The table: aten operation -> how it acts on shards.

A rule looks at an operation's arguments and plans how each replica does its part: which operation, on which
operands, and what the results are together. It returns None where the parts cannot be put together so; then the
operands are gathered and the operation runs as it is. Knowing more rules makes things faster, never more right.

Rules know tensors by shape and :class:`Rows`; nothing here knows of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

aten = torch.ops.aten
Op: TypeAlias = "torch._ops.OpOverload[..., Any]"


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor is dealt out along ``dim``; replica r holds ``rows[r]`` of it."""

    dim: int
    rows: tuple[int, ...]

    @property
    def total(self) -> int:
        """Rows of the whole."""
        return sum(self.rows)

    def shares(self) -> tuple[float, ...]:
        """The fraction of the rows that each replica holds."""
        total = self.total
        return tuple(rows / total for rows in self.rows)


@dataclass(frozen=True, slots=True)
class Parts:
    """Every replica holds a part of the result.

    Attributes:
        combine: How parts become the value; see :data:`COMBINE`.
        weights: What each part counts in a sum; all 1 if None.
        over: Position of the result that the sum of the parts is to be divided by.
    """

    combine: str = "sum"
    weights: tuple[float, ...] | None = None
    over: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """A plain operand that is dealt out, along ``dim``, as the sharded ones are."""

    tensor: Tensor
    dim: int
    rows: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """What each replica runs, and what the results are together.

    In ``args`` and ``kwargs`` a sharded tensor stands for each replica's own rows, a :class:`Cut` for its piece of a
    plain tensor, any other tensor for itself, given whole to each.
    """

    function: Op
    args: tuple[Any, ...]
    outputs: tuple[Rows | Parts | None, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    view: bool = False
    in_place: bool = False


@dataclass(slots=True)
class Call:
    """An operation on arguments of which at least one is sharded.

    Attributes:
        tensors: All tensors among the arguments, in order.
        layouts: The layout of each of them; None for a plain tensor.
    """

    function: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    layouts: list[Rows | None]

    def layout(self, value: object) -> Rows | None:
        """The layout of an argument; None if it is no sharded tensor."""
        for tensor, layout in zip(self.tensors, self.layouts, strict=True):
            if tensor is value:
                return layout
        return None

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Rule: TypeAlias = Callable[[Call], "Plan | None"]

COMBINE: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda parts: _fold(torch.add, parts),
    "amax": lambda parts: torch.stack(parts).amax(0),
    "amin": lambda parts: torch.stack(parts).amin(0),
    "all": lambda parts: torch.stack(parts).all(0),
    "any": lambda parts: torch.stack(parts).any(0),
}
"""Ways to make one value of the replicas' parts, in the order of the replicas."""


def _fold(function: Callable[[Tensor, Tensor], Tensor], parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = function(total, part)
    return total


def plan(call: Call) -> Plan | None:
    """How the replicas carry out ``call``; None: it has to be done on the gathered operands."""
    rule = TABLE.get(call.function)
    if rule is not None:
        return rule(call)
    tags = call.function.tags
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return pointwise(call)
    return None


# ---------------------------------------------------------------------- pointwise


def _aligned(call: Call, *, broadcast: bool) -> tuple[Rows, int, dict[int, Any]] | None:
    """Fit all tensors to the sharded ones' rows.

    Returns:
        The layout of the leading sharded operand, the number of dimensions of the result, and what to write in the
        place of each plain tensor, by id. None if the operands do not fit.
    """
    ndim = max(tensor.dim() for tensor in call.tensors)
    lead: Rows | None = None
    back = 0  # the dealt-out dimension, counted from the end, where broadcasting aligns
    for tensor, layout in zip(call.tensors, call.layouts, strict=True):
        if layout is None:
            continue
        position = tensor.dim() - layout.dim
        if lead is None:
            lead, back = layout, position
        elif position != back or layout.rows != lead.rows:
            return None
    if lead is None:
        return None
    total = lead.total
    places: dict[int, Any] = {}
    for tensor, layout in zip(call.tensors, call.layouts, strict=True):
        if layout is not None:
            continue
        dim = tensor.dim() - back
        if dim >= 0 and tensor.shape[dim] == total and (broadcast or tensor.dim() == ndim):
            places[id(tensor)] = Cut(tensor, dim, lead.rows)
        elif not (broadcast and (dim < 0 or tensor.shape[dim] == 1)):
            return None
    return Rows(ndim - back, lead.rows), ndim, places


def _placed(value: Any, places: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return places.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(item, places) for item in value)
    return value


def _plan_rows(call: Call, places: dict[int, Any], outputs: tuple[Rows | Parts | None, ...], **more: Any) -> Plan:
    args = tuple(_placed(arg, places) for arg in call.args)
    kwargs = {name: _placed(value, places) for name, value in call.kwargs.items()}
    return Plan(call.function, args, outputs, kwargs, **more)


def _output_count(call: Call) -> int:
    return len(call.function._schema.returns)  # pyright: ignore[reportPrivateUsage]


def _is_in_place(function: Op) -> bool:
    """Whether the first argument is written, and is the result."""
    schema = function._schema  # pyright: ignore[reportPrivateUsage]
    alias = schema.arguments[0].alias_info if schema.arguments else None
    return alias is not None and alias.is_write


def pointwise(call: Call) -> Plan | None:
    """Element by element, with broadcasting: each replica does its rows."""
    if "out" in call.kwargs:
        return None
    found = _aligned(call, broadcast=True)
    if found is None:
        return None
    rows, ndim, places = found
    if _is_in_place(call.function):
        target = call.args[0]
        if call.layout(target) is None or target.dim() != ndim:
            return None
        return _plan_rows(call, places, (rows,), in_place=True)
    if call.function._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]
        return None
    return _plan_rows(call, places, (rows,) * _output_count(call))


def same_shape(call: Call) -> Plan | None:
    """All tensors have the same number of dimensions, and so have the results; no broadcasting."""
    found = _aligned(call, broadcast=False)
    if found is None:
        return None
    rows, _, places = found
    return _plan_rows(call, places, (rows,) * _output_count(call))


# ---------------------------------------------------------------------- along other dimensions


def _dims(value: Any, ndim: int) -> list[int] | None:
    """Dimensions counted from the front; None where they make no sense (the operation itself will say so)."""
    dims: Sequence[int] = [value] if isinstance(value, int) else value
    dims = [dim + ndim if dim < 0 else dim for dim in dims]
    return dims if all(0 <= dim < ndim for dim in dims) else None


def along(position: int, name: str = "dim", default: int = -1) -> Rule:
    """Works along one dimension, given as an argument, and keeps all of them: softmax, cumsum, sort, gather …"""

    def rule(call: Call) -> Plan | None:
        found = _aligned(call, broadcast=False)
        if found is None:
            return None
        rows, ndim, places = found
        dims = _dims(call.arg(position, name, default), ndim)
        if dims is None or rows.dim in dims:
            return None
        return _plan_rows(call, places, (rows,) * _output_count(call))

    return rule


def reduction(over_rows: str | None = None, *, dim: int | None = 1, keepdim: int = 2) -> Rule:
    """Reduces dimensions, given as an argument (all when missing or empty).

    Args:
        over_rows: How the replicas' results combine when the dealt-out dimension is reduced, too: "mean" (weighted by
            rows) or a key of :data:`COMBINE`; None: it cannot be done in parts.
        dim: Position of the dimensions among the arguments; None when the operation always reduces all.
        keepdim: Position of ``keepdim``.
    """

    def rule(call: Call) -> Plan | None:
        tensor, layout = call.args[0], call.layout(call.args[0])
        if layout is None or len(call.tensors) != 1:
            return None
        wanted = None if dim is None else call.arg(dim, "dim")
        dims = list(range(tensor.dim())) if wanted is None or wanted == [] else _dims(wanted, tensor.dim())
        if dims is None:
            return None
        if layout.dim in dims:
            if over_rows is None:
                return None
            parts = Parts("sum", layout.shares()) if over_rows == "mean" else Parts(over_rows)
            return Plan(call.function, call.args, (parts,) * _output_count(call), call.kwargs)
        kept = bool(call.arg(keepdim, "keepdim", default=False))
        moved = layout.dim if kept else layout.dim - sum(d < layout.dim for d in dims)
        outputs = (Rows(moved, layout.rows),) * _output_count(call)
        return Plan(call.function, call.args, outputs, call.kwargs)

    return rule


# ---------------------------------------------------------------------- views


def _view_plan(call: Call, args: tuple[Any, ...], *outputs: Rows) -> Plan:
    return Plan(call.function, args, outputs, call.kwargs, view=call.function.is_view)


def reshape(call: Call) -> Plan | None:
    """``view`` and kin: fine as long as every replica's rows stay together, also merged with what follows them."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    if layout is None or not tensor.numel():
        return None
    shape = list(call.arg(1, "size"))
    if -1 in shape:
        known = -math.prod(shape)
        if known == 0 or tensor.numel() % known:
            return None
        shape[shape.index(-1)] = tensor.numel() // known
    before = math.prod(tensor.shape[: layout.dim])
    total = layout.total
    reached = 1
    for dim, size in enumerate(shape):
        if reached == before and (size != 1 or total == 1):
            if any(rows * size % total for rows in layout.rows):
                return None
            rows = tuple(rows * size // total for rows in layout.rows)
            return _view_plan(call, (tensor, [*shape[:dim], -1, *shape[dim + 1 :]]), Rows(dim, rows))
        reached *= size
    return None


def permute(call: Call) -> Plan | None:
    """Dimensions change places."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return None
    order = _dims(call.arg(1, "dims"), tensor.dim())
    return order and _view_plan(call, call.args, Rows(order.index(layout.dim), layout.rows))


def transpose(call: Call) -> Plan | None:
    """Two dimensions change places."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return None
    given = (0, 1) if call.function is aten.t.default else (call.arg(1, "dim0"), call.arg(2, "dim1"))
    dims = _dims(given, max(tensor.dim(), 2))
    if dims is None or tensor.dim() < 2:  # noqa: PLR2004 - the transpose of a vector is the vector
        return _view_plan(call, call.args, layout)
    a, b = dims
    return _view_plan(call, call.args, Rows({a: b, b: a}.get(layout.dim, layout.dim), layout.rows))


def unsqueeze(call: Call) -> Plan | None:
    """A dimension of size 1 comes in."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    dims = _dims(call.arg(1, "dim"), tensor.dim() + 1)
    if layout is None or dims is None:
        return None
    return _view_plan(call, call.args, Rows(layout.dim + (dims[0] <= layout.dim), layout.rows))


def squeeze(call: Call) -> Plan | None:
    """Dimensions of size 1 go. Written out as a ``view``: in one replica the rows may happen to be 1."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return None
    wanted = call.arg(1, "dim")
    dims = list(range(tensor.dim())) if wanted is None else _dims(wanted, tensor.dim())
    if dims is None:
        return None
    gone = [dim for dim in dims if tensor.shape[dim] == 1 and dim != layout.dim]
    moved = Rows(layout.dim - sum(dim < layout.dim for dim in gone), layout.rows)
    return Plan(aten.squeeze.dims, (tensor, gone), (moved,), view=True)


def expand(call: Call) -> Plan | None:
    """Dimensions of size 1 grow, new ones come in front."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return None
    shape = list(call.arg(1, "size"))
    dim = layout.dim + len(shape) - tensor.dim()
    if dim < 0 or shape[dim] not in (-1, layout.total):
        return None
    shape[dim] = -1
    return _view_plan(call, (tensor, shape), Rows(dim, layout.rows))


def pick(call: Call) -> Plan | None:
    """``select``, ``slice``, ``unbind``, ``split`` along another dimension than the rows'."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return None
    position = {aten.select.int: 1, aten.slice.Tensor: 1, aten.unbind.int: 1, aten.unfold.default: 1}.get(
        call.function, 2
    )
    dims = _dims(call.arg(position, "dim", 0), tensor.dim())
    if dims is None:
        return None
    dim = dims[0]
    if dim == layout.dim:
        whole = call.function is aten.slice.Tensor and _is_whole_slice(call, layout.total)
        return _view_plan(call, (tensor, dim), layout) if whole else None
    gone = call.function in (aten.select.int, aten.unbind.int)
    rows = Rows(layout.dim - (gone and dim < layout.dim), layout.rows)
    if call.function is aten.unbind.int:
        count = tensor.shape[dim]
    elif call.function is aten.split.Tensor:
        count = max(1, -(-tensor.shape[dim] // max(1, call.arg(1, "split_size"))))
    elif call.function is aten.split_with_sizes.default:
        count = len(call.arg(1, "split_sizes"))
    else:
        count = 1
    return _view_plan(call, call.args, *(rows,) * count)


def _is_whole_slice(call: Call, total: int) -> bool:
    start, end, step = call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)
    return start in (None, 0) and (end is None or end >= total) and step == 1


def concatenate(call: Call) -> Plan | None:
    """Sharded tensors side by side, along another dimension."""
    rule = along(1, "dim", 0)
    tensors: list[Tensor] = call.args[0]
    if any(tensor.dim() != tensors[0].dim() for tensor in tensors):
        return None  # `cat` lets empty vectors pass
    return rule(call)


def index_select(call: Call) -> Plan | None:
    """Picks by an index that every replica uses alike, along another dimension."""
    tensor, layout = call.args[0], call.layout(call.args[0])
    dims = _dims(call.arg(1, "dim"), tensor.dim())
    if layout is None or call.layout(call.args[2]) is not None or dims is None or layout.dim in dims:
        return None
    return Plan(call.function, call.args, (layout,), call.kwargs)


# ---------------------------------------------------------------------- products


def matmul(call: Call) -> Plan | None:
    """``mm``, ``bmm``: rows times a whole matrix stay rows; rows contracted with rows are parts of a sum."""
    a, b = call.args[:2]
    left, right = call.layout(a), call.layout(b)
    last = a.dim() - 1
    batch = last - 1  # of the left operand: the dimension that is not contracted
    if left is not None and right is None and left.dim == batch:
        return Plan(call.function, call.args, (left,), call.kwargs)
    if right is not None and left is None and right.dim == last:
        return Plan(call.function, call.args, (right,), call.kwargs)
    return _contraction(call, a, b, left, right, last, batch)


def _contraction(
    call: Call, a: Tensor, b: Tensor, left: Rows | None, right: Rows | None, last: int, batch: int
) -> Plan | None:
    along_a = left is None or left.dim == last
    along_b = right is None or right.dim == batch
    lead = left or right
    if lead is None:
        return None
    if along_a and along_b and (left is None or right is None or left.rows == right.rows):
        x = a if left is not None else Cut(a, last, lead.rows)
        y = b if right is not None else Cut(b, batch, lead.rows)
        if a.shape[last] != lead.total or b.shape[batch] != lead.total:
            return None
        return Plan(call.function, (x, y, *call.args[2:]), (Parts(),), call.kwargs)
    if last == 2 and (left is None or left.dim == 0) and (right is None or right.dim == 0):  # noqa: PLR2004
        return same_shape(call)
    return None


def addmm(call: Call) -> Plan | None:
    """``bias + rows @ matrix``, as a linear layer does."""
    bias, a, b = call.args[:3]
    left = call.layout(a)
    if left is None or left.dim != 0 or call.layout(b) is not None or call.layout(bias) is not None or bias.dim() > 1:
        return None
    return Plan(call.function, call.args, (left,), call.kwargs)


def linear(call: Call) -> Plan | None:
    """Rows through a linear layer outside of the model."""
    x = call.args[0]
    left = call.layout(x)
    if left is None or left.dim == x.dim() - 1 or sum(layout is not None for layout in call.layouts) != 1:
        return None
    return Plan(call.function, call.args, (left,), call.kwargs)


# ---------------------------------------------------------------------- losses

NONE, MEAN, SUM = 0, 1, 2


def loss(reduction_at: int) -> Rule:
    """A loss of pairs of elements. A mean is that of the whole batch: parts weighted by their rows."""

    def rule(call: Call) -> Plan | None:
        kind = call.arg(reduction_at, "reduction", MEAN)
        if kind == NONE:
            return pointwise(call)
        found = _aligned(call, broadcast=True)
        if found is None:
            return None
        rows, _, places = found
        return _plan_rows(call, places, (Parts("sum", rows.shares() if kind == MEAN else None),))

    return rule


def loss_backward(reduction_at: int) -> Rule:
    """Gradient of :func:`loss`. A mean divides by the elements of the whole batch, so each replica computes a sum."""

    def rule(call: Call) -> Plan | None:
        kind = call.arg(reduction_at, "reduction", MEAN)
        gradient = call.args[0]
        if kind != NONE and gradient.dim():
            return None
        found = _aligned(call, broadcast=True)
        if found is None or len(call.args) <= reduction_at:
            return None
        rows, _, places = found
        planned = _plan_rows(call, places, (rows,))
        if kind == MEAN:
            count = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in call.tensors)))
            args = [gradient / count, *planned.args[1:]]
            args[reduction_at] = SUM
            planned.args = tuple(args)
        return planned

    return rule


def nll_forward(call: Call) -> Plan | None:
    """Negative log likelihood. A mean is a sum over the batch divided by the sum of the weights of the targets."""
    x, target, weight, kind, ignored = call.args
    layout = call.layout(x)
    if layout is None or layout.dim != 0 or x.dim() not in (2, 4) or call.layout(weight) is not None:
        return None
    if call.layout(target) is None and target.shape[0] != layout.total:
        return None
    if call.layout(target) not in (None, layout):
        return None
    labels = target if call.layout(target) else Cut(target, 0, layout.rows)
    outputs = (layout, Parts()) if kind == NONE else (Parts(over=1 if kind == MEAN else None), Parts())
    return Plan(call.function, (x, labels, weight, SUM if kind == MEAN else kind, ignored), outputs)


def nll_backward(call: Call) -> Plan | None:
    """Gradient of :func:`nll_forward`: the total weight of the whole batch is known by now."""
    gradient, x, target, weight, kind, ignored, total = call.args
    layout = call.layout(x)
    if layout is None or layout.dim != 0 or x.dim() not in (2, 4) or call.layout(weight) or call.layout(total):
        return None
    if kind == NONE:
        if gradient.dim() == 0 or gradient.shape[0] != layout.total:
            return None
        gradient = gradient if call.layout(gradient) else Cut(gradient, 0, layout.rows)
    elif call.layout(gradient):
        return None
    elif kind == MEAN:
        gradient = gradient / total
    labels = target if call.layout(target) else Cut(target, 0, layout.rows)
    args = (gradient, x, labels, weight, SUM if kind == MEAN else kind, ignored, total)
    return Plan(call.function, args, (layout,))


# ---------------------------------------------------------------------- the table


def _table() -> dict[Op, Rule]:
    softmax, summed, mean = along(1), reduction("sum"), reduction("mean")
    table: dict[Op, Rule] = {
        # Copies and fillings of the same shape.
        **dict.fromkeys(
            (
                aten.clone.default, aten._to_copy.default, aten.zeros_like.default, aten.ones_like.default,
                aten.full_like.default, aten.empty_like.default, aten.view.dtype,
            ),
            same_shape,
        ),
        aten.copy_.default: pointwise,
        aten.fill_.Scalar: pointwise,
        aten.fill_.Tensor: pointwise,
        aten.zero_.default: pointwise,
        aten.masked_fill.Scalar: pointwise,
        aten.masked_fill.Tensor: pointwise,
        # Along a dimension that stays.
        aten._softmax.default: softmax,
        aten._log_softmax.default: softmax,
        aten._softmax_backward_data.default: along(2),
        aten._log_softmax_backward_data.default: along(2),
        aten.cumsum.default: softmax,
        aten.cumprod.default: softmax,
        aten.logcumsumexp.default: softmax,
        aten.sort.default: softmax,
        aten.sort.stable: along(99),
        aten.topk.default: along(2),
        aten.gather.default: softmax,
        aten.flip.default: along(1, "dims"),
        aten.index_select.default: index_select,
        aten.cat.default: concatenate,
        # Reductions.
        aten.sum.default: reduction("sum", dim=None),
        aten.sum.dim_IntList: summed,
        aten.mean.default: reduction("mean", dim=None),
        aten.mean.dim: mean,
        aten.amax.default: reduction("amax"),
        aten.amin.default: reduction("amin"),
        aten.max.default: reduction("amax", dim=None),
        aten.min.default: reduction("amin", dim=None),
        aten.all.default: reduction("all", dim=None),
        aten.any.default: reduction("any", dim=None),
        aten.all.dim: reduction("all"),
        aten.any.dim: reduction("any"),
        aten.max.dim: reduction(),
        aten.min.dim: reduction(),
        aten.prod.dim_int: reduction(),
        aten.logsumexp.default: reduction(),
        aten.argmax.default: reduction(),
        aten.argmin.default: reduction(),
        aten.var.correction: reduction(keepdim=99),
        aten.std.correction: reduction(keepdim=99),
        aten.linalg_vector_norm.default: reduction(dim=2, keepdim=3),
        aten.norm.ScalarOpt_dim: reduction(dim=2, keepdim=3),
        aten.median.dim: reduction(),
        # Views.
        **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), reshape),
        aten.permute.default: permute,
        aten.transpose.int: transpose,
        aten.t.default: transpose,
        aten.unsqueeze.default: unsqueeze,
        **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), squeeze),
        aten.expand.default: expand,
        **dict.fromkeys(
            (
                aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default,
                aten.unfold.default,
            ),
            pick,
        ),
        # Products.
        aten.mm.default: matmul,
        aten.bmm.default: matmul,
        aten.addmm.default: addmm,
        aten.linear.default: linear,
        # Losses.
        **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), nll_forward),
        **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), nll_backward),
        aten.mse_loss.default: loss(2),
        aten.mse_loss_backward.default: loss_backward(3),
        aten.smooth_l1_loss.default: loss(2),
        aten.smooth_l1_loss_backward.default: loss_backward(3),
        aten.huber_loss.default: loss(2),
        aten.huber_loss_backward.default: loss_backward(3),
        aten.soft_margin_loss.default: loss(2),
        aten.soft_margin_loss_backward.default: loss_backward(3),
        aten.binary_cross_entropy.default: loss(3),
        aten.binary_cross_entropy_backward.default: loss_backward(4),
        aten.binary_cross_entropy_with_logits.default: loss(4),
    }  # fmt: skip
    return table


TABLE: dict[Op, Rule] = _table()
"""Operations that are not simply pointwise, which need no line here."""
