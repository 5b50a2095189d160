"""What a random program needs around it: this file, the program and a call of `check` make a script that runs alone."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401 - programs use it
from torch import Tensor, nn

import evenly

REFUSED = ("shares its memory with", "was changed in place by forward", "may be a constant, a mean or a sum")
"""What evenly says of changes in place that it cannot follow, and of outputs that nothing is known of."""

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    left: Any
    right: Any


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in quarters, all of them different and exact in every floating dtype; the same for the same seed."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    numbers = (order.reshape(shape) - count // 2).double() / 4
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


def raises(action: Callable[[], Any]) -> str:
    """The kind of error that an action ends with."""
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def check(
    make: Callable[[], nn.Module],
    program: Callable[..., dict[str, Any]],
    *,
    tolerance: float,
    wrap: Callable[..., nn.Module] = evenly.DataParallel,
    **options: Any,
) -> None:
    """Assert that a program sees the same over the bare module and over replicas."""
    found: list[dict[str, Any]] = []
    for bare in (True, False):
        torch.manual_seed(0)
        module = make()
        model = module if bare else wrap(module, **options)
        marks = [_unmarked, _unmarked] if bare else [evenly.replicate, evenly.samples]
        try:
            seen = program(model, *marks)
        except (RuntimeError, ValueError) as error:
            if not bare and any(words in str(error) for words in REFUSED):
                return
            raise
        seen["gradients of parameters"] = {name: value.grad for name, value in module.named_parameters()}
        seen["parameters"] = dict(module.named_parameters())
        found.append(seen)
    expected, seen = found
    problems = list(differences(seen, expected, "", tolerance))
    assert not problems, "evenly != bare\n" + "\n".join(problems[:12])


def _unmarked(value: Any) -> Any:
    return value


def differences(  # noqa: C901 - one branch per kind of value
    found: Any, expected: Any, path: str, tolerance: float
) -> Iterator[str]:
    """What is not the same in two nested values, each with where it is."""
    if isinstance(expected, Tensor):
        yield from _tensor_differences(found, expected, path, tolerance)
    elif type(found) is not type(expected):
        yield f"{path} is a {type(found).__name__} ({found!r:.80}), expected a {type(expected).__name__}"
    elif isinstance(expected, Mapping):
        if list(found) != list(expected):
            yield f"{path} has {list(found)}, expected {list(expected)}"
            return
        for key in expected:
            yield from differences(found[key], expected[key], f"{path}[{key!r}]" if path else str(key), tolerance)
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{path} has {len(found)} items, expected {len(expected)}"
            return
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{path}[{place}]", tolerance)
    elif dataclasses.is_dataclass(expected):
        yield from differences(vars(found), vars(expected), path, tolerance)
    elif isinstance(expected, (float, complex)):
        one, other = torch.tensor(found), torch.tensor(expected)
        yield from _tensor_differences(one, other, path, tolerance)
    elif found != expected:
        yield f"{path} is {found!r:.80}, expected {expected!r:.80}"


def _tensor_differences(found: Any, expected: Tensor, path: str, tolerance: float) -> Iterator[str]:
    if not isinstance(found, Tensor):
        yield f"{path} is {found!r:.80}, expected a tensor of shape {list(expected.shape)}"
        return
    if isinstance(found, evenly.ShardedTensor) and path.startswith(("x_grad", "leaf_grad", "y_grad", "gradients of")):
        yield f"{path} is sharded, and its leaf is not"
    if isinstance(expected, nn.Parameter) != isinstance(found, nn.Parameter):
        yield f"{path} is a {type(found).__name__}, expected a {type(expected).__name__}"
    for what in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout"):
        try:
            other = getattr(expected, what)
        except RuntimeError:  # a view that must not be looked at any more
            return
        one = getattr(found, what)
        if what in ("requires_grad", "is_leaf") and path.startswith("first["):
            continue  # a gradient that is constant may say that it has one, which is then zero
        if one != other:
            yield f"{path} has {what} {one}, expected {other}"
            return
    one, other = found.detach(), expected.detach()
    if isinstance(one, evenly.ShardedTensor):
        one = one.full_tensor()
    wide = torch.complex128 if other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = other.abs()[other.isfinite()]
    scale = max(1.0, float(finite.max()) if finite.numel() else 0.0)
    if not torch.allclose(one, other, rtol=0, atol=tolerance * scale, equal_nan=True):
        shown = [tensor.flatten()[:6].tolist() for tensor in (one, other)]
        yield f"{path} (shape {list(other.shape)}) is {shown[0]}, expected {shown[1]}"
