"""A walk over PyTorch's own samples of its operations, on sharded tensors against plain ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

from evenly.sharded import ShardedTensor, gathered, plain
from evenly.team.team import Team
from sharding import shard, uneven

SKIPPED: dict[str, str] = {
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        "its result has no values",
    ),
    "as_strided.partial_views": "reads memory in front of and behind its tensor",
    **{
        f"jiterator_{kind}": "compiles for CUDA only"
        for kind in ("unary", "binary", "4inputs_with_extra_args", "binary_return_by_ref", "2inputs_2outputs")
    },
}
"""Operations that cannot be compared, and why."""

IGNORES_OUT = ("linalg.matrix_rank", "linalg.matrix_rank.hermitian")
"""PyTorch itself, above what can be seen here, forgets ``out`` when its input is of a subclass of Tensor."""

DTYPES = (torch.float64, torch.int64, torch.complex128, torch.float32, torch.bool)
"""In the order in which they are tried, until the operation supports one."""


@dataclass
class Outcome:
    """What became of one operation.

    Attributes:
        tried: How many samples had rows to deal out.
        sharded, parts, whole: How many results stayed sharded, are a partial sum, were computed on the driver.
        gathered: Operations below it that gathered, and how often.
        failures: What differed.
    """

    tried: int = 0
    sharded: int = 0
    parts: int = 0
    whole: int = 0
    gathered: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Variant:
    """How a sample is run.

    Attributes:
        samples: How many of them.
        dim: Along which dimension its tensors are dealt out.
        all_aligned: Not only the first tensor, but all that are as large as it along ``dim``, and gradients, too.
        backward: Whether gradients are compared, too.
        how: The operation itself, its in-place variant, or with a sharded ``out``.
        dtype: Instead of the first of :data:`DTYPES`.
    """

    samples: int
    dim: int = 0
    all_aligned: bool = False
    backward: bool = True
    how: str = "call"
    dtype: torch.dtype | None = None


MOST_SAMPLES = 100
"""Of which to choose: some operations have more than a thousand, and making them takes longer than running a few."""


def name_of(op: OpInfo) -> str:
    """The name of an operation, as PyTorch's own tests say it."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def walk(team: Team, op: OpInfo, variants: Sequence[Variant]) -> Outcome:
    """Run one operation's samples."""
    outcome = Outcome()
    for variant in variants:
        dtypes = op.supported_dtypes("cpu")
        dtype = variant.dtype or next((dtype for dtype in DTYPES if dtype in dtypes), None)
        if dtype not in dtypes:
            continue
        function = _variant_of(op, variant.how)
        if function is None:
            continue
        backward = variant.backward and dtype in op.supported_backward_dtypes("cpu") and op.supports_autograd
        before = gathered.copy()
        for sample in samples(op, dtype, variant, requires_grad=backward):
            compare(team, function, sample, variant, outcome)
        if variant == variants[0]:
            outcome.gathered = gathered - before
    return outcome


def _variant_of(op: OpInfo, how: str) -> Callable[..., Any] | None:
    """The operation, its in-place variant or with ``out=``, as a function of the same arguments."""
    if how == "call":
        return op.op
    if how == "in_place":
        in_place = op.inplace_variant

        def write(value: Any, *args: Any, **kwargs: Any) -> Any:
            target = value * 1 if isinstance(value, Tensor) and value.dtype != torch.bool else value
            return in_place(target, *args, **kwargs)

        return write if in_place is not None else None
    if not op.supports_out or name_of(op) in IGNORES_OUT:
        return None

    def put(value: Any, *args: Any, **kwargs: Any) -> Any:
        shape_of = op.op(value, *args, **kwargs)
        if not isinstance(shape_of, Tensor):
            return shape_of
        return op.op(value, *args, **kwargs, out=torch.zeros_like(shape_of))

    return put


def samples(op: OpInfo, dtype: torch.dtype, variant: Variant, *, requires_grad: bool) -> list[Any]:
    """Samples with rows to deal out, spread over all that there are."""
    with seeded():
        found = [
            sample
            for sample in itertools.islice(
                op.sample_inputs_func(op, "cpu", dtype, requires_grad), max(MOST_SAMPLES, variant.samples)
            )
            if _first(sample, variant.dim) is not None and not (variant.how == "in_place" and sample.broadcasts_input)
        ]
    step = max(1, len(found) / variant.samples)
    return [found[int(i * step)] for i in range(min(variant.samples, len(found)))]


def _first(sample: Any, dim: int = 0) -> Tensor | None:
    """The first tensor that has at least two rows."""
    for leaf in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dim() > dim and leaf.shape[dim] > 1:
            return leaf
    return None


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers every time."""
    state, seed = torch.get_rng_state(), torch.default_generator.manual_seed
    # For devices that are not there yet `torch.manual_seed` remembers who asked, which takes longer than the sample.
    with mock.patch.object(torch, "manual_seed", seed):
        seed(0)
        random.seed(0)
        try:
            yield
        finally:
            torch.set_rng_state(state)


def compare(team: Team, function: Callable[..., Any], sample: Any, variant: Variant, outcome: Outcome) -> None:
    """Run ``function`` on a sample twice, plain and sharded, and note what differs."""
    first = _first(sample, variant.dim)
    if first is None:
        return
    rows = lopsided(first.shape[variant.dim], team.size)
    if min(rows) == 0:
        return
    outcome.tried += 1
    arguments = (sample.input, sample.args, sample.kwargs)

    def deal(leaf: Any, *, sharded: bool, seen: dict[int, Any]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in seen:
            aligned = (
                leaf.layout is torch.strided
                and leaf.dim() > variant.dim
                and leaf.shape[variant.dim] == first.shape[variant.dim]
            )
            if sharded and (leaf is first or (variant.all_aligned and aligned)):
                seen[id(leaf)] = shard(team, leaf, variant.dim, rows)
            else:
                seen[id(leaf)] = _copy(leaf)
        return seen[id(leaf)]

    found: list[Any] = []
    for sharded in (False, True):
        seen: dict[int, Any] = {}
        dealt = pytree.tree_map(functools.partial(deal, sharded=sharded, seen=seen), arguments)
        with seeded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(_run(function, sample, dealt, seen, variant))
    for difference in _differences(*found, outcome, variant):
        outcome.failures.append(f"{_words(sample)}: {difference}")


def _copy(leaf: Tensor) -> Tensor:
    if leaf.layout is not torch.strided:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    copy = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if 0 not in leaf.stride() else None
    detached = leaf.detach()
    made = detached.clone() if copy is None or _overlaps(leaf) else copy.copy_(detached)
    return made.requires_grad_(leaf.requires_grad)


def _overlaps(leaf: Tensor) -> bool:
    return torch._debug_has_internal_overlap(leaf) != 0


def lopsided(total: int, replicas: int) -> tuple[int, ...]:
    """Rows that differ from replica to replica: one more for the first where a batch would be split evenly."""
    rows = list(uneven(total, replicas))
    if len(set(rows)) == 1 and rows[-1] > 1:
        rows[0], rows[-1] = rows[0] + 1, rows[-1] - 1
    return tuple(rows)


def _words(sample: Any) -> str:
    def word(leaf: Any) -> str:
        if isinstance(leaf, Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        return repr(leaf)

    words = [word(leaf) for leaf in pytree.tree_leaves((sample.input, sample.args))]
    return ", ".join([*words, *(f"{name}={pytree.tree_map(word, value)}" for name, value in sample.kwargs.items())])


@dataclass
class _Result:
    error: BaseException | None
    values: list[Any]
    shards: list[str]
    gradients: list[Any]
    inputs: list[Tensor]


def _run(
    function: Callable[..., Any], sample: Any, dealt: tuple[Any, Any, Any], seen: dict[int, Any], variant: Variant
) -> _Result:
    value, args, kwargs = dealt
    result = _Result(None, [], [], [], [])
    try:
        output = function(value, *args, **kwargs)
        output = sample.output_process_fn_grad(output)
        leaves = pytree.tree_leaves(output)
        for leaf in leaves:
            result.shards.append(_kind(leaf))
            result.values.append(leaf)
        if variant.backward:
            outputs = [
                leaf
                for leaf in leaves
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.layout is torch.strided
            ]
            inputs = [tensor for tensor in seen.values() if tensor.requires_grad]
            outputs = [leaf for leaf in outputs if not any(leaf is tensor for tensor in inputs)]
            if outputs and inputs:
                seeds = [_gradient_for(leaf, like=variant.all_aligned) for leaf in outputs]
                result.gradients = list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))
        result.values = [_settled(leaf) for leaf in result.values]
        result.gradients = [_settled(gradient) for gradient in result.gradients]
        result.inputs = [_settled(tensor) for tensor in seen.values()]
    except Exception as error:  # whatever it raises is compared
        result.error = error
    return result


def _gradient_for(leaf: Tensor, *, like: bool) -> Tensor:
    """Numbers that differ; dealt out as ``leaf`` is, if so wanted."""
    count = max(leaf.numel(), 1)
    ramp = torch.linspace(0.5, 1.5, count, dtype=torch.float64)[: leaf.numel()].reshape(leaf.shape).to(leaf.dtype)
    shards = leaf.shards if isinstance(leaf, ShardedTensor) else None
    return shard(shards.team, ramp, shards.dim, shards.rows) if like and shards else ramp


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, ShardedTensor):
        return "whole"
    return "sharded" if leaf.shards is not None else "parts" if leaf.parts is not None else "whole"


def _settled(leaf: Any) -> Any:
    if isinstance(leaf, ShardedTensor):
        detached = leaf.detach()
        value = plain(detached)
        assert (value.shape, value.dtype) == (leaf.shape, leaf.dtype), f"is {value.shape}, says {leaf.shape}"
        return _Strided(value.clone(), leaf.stride())
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


@dataclass
class _Strided:
    value: Tensor
    stride: tuple[int, ...]


def _differences(bare: _Result, evenly: _Result, outcome: Outcome, variant: Variant) -> Iterator[str]:
    if (bare.error is None) != (evenly.error is None) or (
        bare.error is not None and type(bare.error) is not type(evenly.error)
    ):
        yield f"raises {evenly.error!r}, plain {bare.error!r}"
        return
    if bare.error is not None:
        if variant.how == "call":
            yield f"plain raises {bare.error!r}"
        return
    for kind in evenly.shards if variant == Variant(variant.samples) else ():
        setattr(outcome, kind, getattr(outcome, kind) + 1)
    groups = (("value", bare.values, evenly.values), ("gradient", bare.gradients, evenly.gradients))
    for what, expected, actual in (*groups, ("input afterwards", bare.inputs, evenly.inputs)):
        if len(expected) != len(actual):
            yield f"{len(actual)} {what}s, plain {len(expected)}"
            continue
        for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
            difference = _difference(a, b, strict=what == "value" and variant.dim == 0)
            if difference:
                yield f"{what} {position} {difference}"


def _difference(expected: Any, actual: Any, *, strict: bool) -> str | None:
    stride = None
    if isinstance(actual, _Strided):
        actual, stride = actual.value, actual.stride
    if not isinstance(expected, Tensor):
        return None if type(expected) is type(actual) and _equal(expected, actual) else f"{actual!r} != {expected!r}"
    if not isinstance(actual, Tensor):
        return f"is {actual!r}, plain a tensor"
    if (expected.shape, expected.dtype, expected.layout) != (actual.shape, actual.dtype, actual.layout):
        return f"is {actual.dtype}{list(actual.shape)}, plain {expected.dtype}{list(expected.shape)}"
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except (AssertionError, RuntimeError) as error:
        return "differs: " + " ".join(str(error).split())[:200]
    if strict and stride is not None and expected.numel() > 1:
        wanted = [(n, s) for n, s in zip(expected.shape, expected.stride(), strict=True) if n > 1]
        got = [(n, s) for n, s in zip(expected.shape, stride, strict=True) if n > 1]
        if wanted != got:
            return f"has strides {stride}, plain {expected.stride()}"
    return None


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124 - both are nan
