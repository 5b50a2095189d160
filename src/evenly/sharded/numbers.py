"""Arithmetic with numbers that are not known yet: ``loss / steps``, ``loss1 + weight * loss2``, ``total += loss``.

Nothing has to be added up for it before somebody looks at the result.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evenly.rules.plan import Op, aten
from evenly.sharded.content import Parts, Pending
from evenly.sharded.tensor import ShardedTensor

NUMBERS: set[Op] = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.add.Scalar,
    aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar,
}  # fmt: skip
NUMBERS_IN_PLACE: dict[Op, Op] = {
    aten.add_.Tensor: aten.add.Tensor, aten.sub_.Tensor: aten.sub.Tensor, aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor, aten.add_.Scalar: aten.add.Scalar, aten.sub_.Scalar: aten.sub.Scalar,
    aten.mul_.Scalar: aten.mul.Scalar, aten.div_.Scalar: aten.div.Scalar,
}  # fmt: skip

_LONGEST = 64
"""Operations that hang together before they are carried out after all: a running sum must not grow for ever."""


def pending(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor | None:
    """The result of an operation on numbers of which at least one is not known yet; None where that is not the case."""
    operands: list[Any] = []
    stand_ins: list[Any] = []
    depth = 0
    device = None
    for arg in args:
        if not isinstance(arg, Tensor):
            operands.append(arg)
            stand_ins.append(arg)
            continue
        if arg.dim() != 0 or device not in (None, arg.device):
            return None
        device = arg.device
        content = arg.content if isinstance(arg, ShardedTensor) else None
        if isinstance(content, (Parts, Pending)):
            depth = max(depth, content.depth + 1 if isinstance(content, Pending) else 1)
            operands.append(content)
            stand_ins.append(content.local)
        else:  # what is known is taken as it is now: it may be written to before somebody looks
            value = (arg.plain() if isinstance(arg, ShardedTensor) else arg.detach()).clone()
            operands.append(value)
            stand_ins.append(value)
    if not 0 < depth <= _LONGEST:
        return None
    target = NUMBERS_IN_PLACE.get(function)
    result = (target or function)(*stand_ins, **kwargs)
    made = Pending(target or function, tuple(operands), kwargs, result, depth)
    if target is None:
        return ShardedTensor(made, (), ())
    first = args[0]
    if not isinstance(first, ShardedTensor) or first.parts is None or result.dtype != first.dtype:
        return None
    return first.replace(made)
