"""Losses of ``torch.nn.functional`` whose mean is not over rows, as they run inside of ``forward``.

Each divides by what the targets weigh: valid tokens, class weights, weights of elements. On a shard that is another
number than over the batch. So each is computed as a sum, and a mean of the whole batch is made of the sum and
this shard's denominator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

Mean: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""Makes the mean over the whole batch of a shard's numerator and denominator."""

_Reduction: Any = cast("Any", F)._Reduction  # as F itself resolves what a reduction means
_NAMES = ("none", "mean", "sum")


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """What is meant, in today's words; the deprecated ones win, as in torch."""
    if size_average is not None or reduce is not None:
        return str(_Reduction.legacy_get_string(size_average, reduce))
    number: int = _Reduction.get_enum(reduction)
    return _NAMES[number]


def _cross_entropy(
    mean: Mean,
    input: Tensor,  # noqa: A002 - as in F.cross_entropy
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    loss = partial(F.cross_entropy, input, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    reduction = _reduction(size_average, reduce, reduction)
    return _over_targets(mean, loss, reduction, input, target, weight, ignore_index)


def _nll_loss(
    mean: Mean,
    input: Tensor,  # noqa: A002 - as in F.nll_loss
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    loss = partial(F.nll_loss, input, target, weight, ignore_index=ignore_index)
    reduction = _reduction(size_average, reduce, reduction)
    return _over_targets(mean, loss, reduction, input, target, weight, ignore_index)


def _linear_cross_entropy(
    mean: Mean,
    input: Tensor,  # noqa: A002 - as in F.linear_cross_entropy
    linear_weight: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **options: Any,
) -> Tensor:
    loss = partial(
        cast("Any", F).linear_cross_entropy,
        input,
        linear_weight,
        target,
        weight=weight,
        ignore_index=ignore_index,
        **options,
    )
    ignored = -100 if ignore_index is None else ignore_index
    reduction = _reduction(None, None, reduction)
    return _over_targets(mean, loss, reduction, input, target, weight, ignored, classes=linear_weight.shape[0])


def _over_targets(
    mean: Mean,
    loss: Callable[..., Tensor],
    reduction: str,
    input: Tensor,  # noqa: A002 - as in F.cross_entropy
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    *,
    classes: int | None = None,
) -> Tensor:
    """A loss in a given reduction; its mean, if there are rows, is over what the targets of the whole batch weigh."""
    if reduction != "mean" or input.dim() < 2:  # noqa: PLR2004 - a single row without its dimension
        return loss(reduction=reduction)
    total = loss(reduction="sum")
    classes = input.shape[1] if classes is None else classes
    return mean(total, _weight_of(target, classes, weight, ignore_index, total.dtype))


def _weight_of(target: Tensor, classes: int, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What the targets of this shard weigh together: their number, without class weights."""
    if target.is_floating_point():  # probabilities of classes: their mean is over positions, whatever these weigh
        return torch.tensor(target.numel() // classes, dtype=torch.float64, device=target.device)
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(torch.float64)
    return (weight.detach().to(dtype)[target.where(valid, 0)] * valid).sum().to(torch.float64)


def _of_operator(loss: Callable[..., Tensor], usual: int) -> Callable[..., Tensor]:
    """The same loss where it is called as torch's own operator, whose reduction is a number, ``usual`` by default."""

    def called(
        mean: Mean,
        self: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = usual,
        ignore_index: int = -100,
        *smoothing: float,
        **more: Any,
    ) -> Tensor:
        more |= dict(zip(("label_smoothing",), smoothing, strict=False))
        return loss(mean, self, target, weight, None, ignore_index, None, _NAMES[reduction], **more)

    return called


def _weighted(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of elements that divides by the sum of their weights, where it is given any."""

    def called(
        mean: Mean,
        input: Tensor,  # noqa: A002 - as in F.mse_loss
        target: Tensor,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
    ) -> Tensor:
        weight = _passed_weight(loss) if weight is None else weight
        if weight is None:
            return loss(input, target, size_average, reduce, reduction)
        reduction = _reduction(size_average, reduce, reduction)
        if reduction != "mean":
            return loss(input, target, reduction=reduction, weight=weight)
        return mean(loss(input, target, reduction="sum", weight=weight), weight.sum())

    return called


def _passed_weight(loss: Any) -> Tensor | None:
    """The weight that a call of ``loss`` above this one got: torch 2.13's ``F.l1_loss`` does not pass it on."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


def _table() -> dict[Any, Callable[..., Tensor]]:
    table: dict[Any, Callable[..., Tensor]] = {
        F.cross_entropy: _cross_entropy,
        F.nll_loss: _nll_loss,
        F.mse_loss: _weighted(F.mse_loss),
        F.l1_loss: _weighted(F.l1_loss),
    }
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.12
        table[cast("Any", F).linear_cross_entropy] = _linear_cross_entropy
    for name in ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"):
        loss = _cross_entropy if name == "cross_entropy_loss" else _nll_loss
        operator = getattr(torch.ops.aten, name)
        table[operator] = table[operator.default] = _of_operator(loss, usual=1)
        # Called like this, without a reduction, it does none, whatever the operator's own default is.
        table[getattr(cast("Any", torch)._C._nn, name)] = _of_operator(loss, usual=0)
    return table


LOSSES = _table()
"""By the function that a model calls. Each takes a :data:`Mean`, and then what the function takes."""
