"""The fallback: an operation on whole tensors, as PyTorch does it."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from evenly.rules.plan import Op, aten
from evenly.sharded import conjugation
from evenly.sharded.arguments import mapped

if TYPE_CHECKING:
    from evenly.sharded.tensor import ShardedTensor

gathered: Counter[str] = Counter()
"""How often each operation had to gather its operands, by its name."""

LARGE_BYTES = 1 << 20
"""Gathering more than this for one operation is worth a warning, once per operation."""

_warned: set[str] = set()

SHAPE_ONLY = {
    aten.empty_like.default, aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default,
}  # fmt: skip
"""Operations that look at the shape of their first argument only: no reason to gather it."""


FILLING = {
    aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default, aten.exponential_.default,
    aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default, aten.random_.default, aten.random_.to,
    getattr(aten.random_, "from"),
}  # fmt: skip
"""Operations that write all of their first argument without looking at it."""


def run_gathered(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation as PyTorch does, on whole tensors.

    Tensors that it writes to, or returns a view of, are brought here for good: a copy would not see the writes.
    """
    from evenly.sharded.tensor import ShardedTensor

    schema = function._schema
    size = 0
    used: list[tuple[ShardedTensor, Tensor]] = []

    def whole(value: Any, settle: bool, shape_only: bool) -> Any:
        nonlocal size
        if isinstance(value, ShardedTensor):
            if shape_only and not value.is_plain:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            overwrite = function in FILLING
            if value.shards is not None and not overwrite:
                size += value.numel() * value.element_size()
            if not settle:
                return value.plain()
            found = value.settle(overwrite=overwrite)
            used.append((value, found))
            return found
        return value

    aliased = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    names = [argument.name for argument in schema.arguments]
    if schema.is_mutable:
        _check_writable(function, args, kwargs)
    shape_only = function in SHAPE_ONLY
    with conjugation.respected():
        whole_args = tuple(
            mapped(arg, whole, names[position] in aliased, shape_only) for position, arg in enumerate(args)
        )
        whole_kwargs = {name: mapped(value, whole, name in aliased, False) for name, value in kwargs.items()}
        note(function.name(), size)
        result = function(*whole_args, **whole_kwargs)
    if not schema.is_mutable:
        return result
    for given, settled in used:
        given.follow(settled)
    return _as_given(result, used)


def _check_writable(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from evenly.sharded.tensor import ShardedTensor

    arguments = function._schema.arguments
    for argument, value in zip(arguments, [*args, *(kwargs.get(a.name) for a in arguments[len(args) :])], strict=True):
        if isinstance(value, ShardedTensor) and argument.alias_info is not None and argument.alias_info.is_write:
            value.check_writable()


def _as_given(result: Any, used: list[tuple[ShardedTensor, Tensor]]) -> Any:
    """An operation that writes to a tensor returns that tensor, not what it stands for."""
    if isinstance(result, (list, tuple)):
        return type(cast("list[Any]", result))([_as_given(item, used) for item in cast("list[Any]", result)])
    return next((given for given, settled in used if settled is result), result)


def note(name: str, size: int) -> None:
    """Count an operation that gathered ``size`` bytes, and warn if that is much."""
    if not size:
        return
    gathered[name] += 1
    if size > LARGE_BYTES and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} works on whole tensors: {size / 2**20:.1f} MiB were gathered on the first device for it "
            "(said once per operation)",
            stacklevel=2,
        )
