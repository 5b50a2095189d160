"""The promise, as a test states it: the same loop, over the bare module and over `DataParallel`, gives the same.

    def loop(model):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    assert_same(make_module, loop)

The helper runs the loop on a copy of the module, and on wrapped copies with two and three replicas. It compares what
the loop returns, and then every gradient (None where it is None), parameter and buffer of the module.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from evenly import DataParallel
from evenly.sharded import ShardedTensor

REPLICAS = (2, 3)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference of two tensors, as a part of the largest value."""


_kept: dict[int, Any] = {}


def let_go() -> None:
    """Keep no processes for further tests."""
    _kept.clear()
    gc.collect()


def wrap(module: nn.Module, replicas: int = 2, **options: Any) -> DataParallel:
    """The module over replicas on the CPU; all tests of a file share the processes."""
    model = DataParallel(module, device_ids=["cpu"] * replicas, **options)
    _kept[replicas] = model._team  # starting processes takes seconds: they outlive the model
    return model


def assert_same(
    make: Callable[[], nn.Module],
    loop: Callable[[nn.Module], Any],
    *,
    replicas: Iterable[int] = REPLICAS,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Run a loop bare and over replicas, and compare.

    Args:
        make: Makes the module; called for each run, after seeding.
        loop: Trains or evaluates the model that it is given; what it returns is compared, too.
        replicas: Numbers of replicas to try.
        tolerance: Instead of :data:`TOLERANCE`.
        **options: Further arguments of :class:`DataParallel`.
    """
    module = _make(make)
    expected = _run(module, module, loop)
    for count in replicas:
        module = _make(make)
        found = _run(wrap(module, count, **options), module, loop)
        compare(found, expected, f"{count} replicas: ", tolerance)


def _make(make: Callable[[], nn.Module]) -> nn.Module:
    # Not a copy: modules with the old weight norm cannot be copied.
    torch.manual_seed(0)
    return make()


def _run(model: nn.Module, module: nn.Module, loop: Callable[[nn.Module], Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    returned = loop(model)
    return {
        "returned": returned,
        "gradient": {name: parameter.grad for name, parameter in module.named_parameters()},
        "parameter": dict(module.named_parameters()),
        "buffer": dict(module.named_buffers()),
    }


def training(
    batches: Sequence[tuple[tuple[Any, ...], Any]],
    loss: Callable[..., Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
) -> Callable[[nn.Module], Any]:
    """A plain training loop over batches of (arguments, target), which returns outputs and losses.

    Without an optimizer gradients add up over the batches.
    """

    def loop(model: nn.Module) -> Any:
        stepper = optimizer and optimizer(model.parameters())
        seen = []
        for args, target in batches:
            if stepper:
                stepper.zero_grad()
            output = model(*args)
            value = loss(output, target)
            value.backward()
            if stepper:
                stepper.step()
            seen.append({"output": output, "loss": value})
        return seen

    return loop


def compare(found: Any, expected: Any, path: str = "", tolerance: float | None = None) -> None:
    """Assert that two nested values have the same structure, types, shapes, dtypes and (nearly) values."""
    problems = list(_differences(found, expected, path, tolerance))
    assert not problems, "evenly != bare\n" + "\n".join(problems[:12])


def _differences(  # noqa: C901, PLR0912 - one branch per kind of value
    found: Any, expected: Any, path: str, tolerance: float | None
) -> Iterator[str]:
    if isinstance(expected, Tensor):
        yield from _tensor_differences(found, expected, path, tolerance)
        return
    if type(found) is not type(expected):
        yield f"{path} is a {type(found).__name__} ({found!r:.60}), expected a {type(expected).__name__}"
    elif isinstance(expected, Mapping):
        if list(found) != list(expected):
            yield f"{path} has {list(found)}, expected {list(expected)}"
            return
        for key in expected:
            yield from _differences(found[key], expected[key], f"{path}[{key!r}]", tolerance)
        if dataclasses.is_dataclass(expected):
            yield from _differences(vars(found), vars(expected), path, tolerance)
    elif isinstance(expected, PackedSequence):
        yield from _differences(tuple(found), tuple(expected), path, tolerance)
    elif isinstance(expected, (list, tuple)) or hasattr(expected, "maxlen"):
        if len(found) != len(expected):
            yield f"{path} has {len(found)} items, expected {len(expected)}"
            return
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _differences(one, other, f"{path}[{place}]", tolerance)
    elif dataclasses.is_dataclass(expected):
        yield from _differences(vars(found), vars(expected), path, tolerance)
    elif isinstance(expected, float):
        dtype = torch.float32 if tolerance is None else torch.float64
        one, other = torch.tensor(found, dtype=dtype), torch.tensor(expected, dtype=dtype)
        yield from _tensor_differences(one, other, path, tolerance)
    elif found != expected:
        yield f"{path} is {found!r:.80}, expected {expected!r:.80}"


def _tensor_differences(found: Any, expected: Tensor, path: str, tolerance: float | None) -> Iterator[str]:
    if not isinstance(found, Tensor):
        yield f"{path} is {found!r:.60}, expected a tensor of shape {list(expected.shape)}"
        return
    if not isinstance(found, ShardedTensor) and type(found) is not type(expected):
        yield f"{path} is a {type(found).__name__}, expected a {type(expected).__name__}"
    for what in ("shape", "dtype", "device", "requires_grad", "layout"):
        one, other = getattr(found, what), getattr(expected, what)
        if one != other:
            yield f"{path} has {what} {one}, expected {other}"
            return
    one, other = found.detach(), expected.detach()
    if isinstance(one, ShardedTensor):
        one = one.full_tensor()
    if other.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if not (other.is_floating_point() or other.is_complex()):
        if not torch.equal(one, other):
            yield f"{path} is {_show(one)}, expected {_show(other)}"
        return
    wide = torch.complex128 if other.is_complex() else torch.float64
    limit = TOLERANCE.get(other.dtype, 1e-5) if tolerance is None else tolerance
    one, other = one.to(wide), other.to(wide)
    scale = max(float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0, 1e-30)
    if not torch.allclose(one, other, rtol=0, atol=limit * scale, equal_nan=True):
        off = float((one - other).abs().nan_to_num(0).max()) / scale
        values = f"{_show(one)} vs {_show(other)}"
        yield f"{path} (shape {list(other.shape)}) is off by {off:.1e}, allowed {limit:.0e}: {values}"


def _show(tensor: Tensor) -> str:
    return repr(tensor.flatten()[:4].tolist())
