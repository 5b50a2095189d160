"""How an output depends on the batch, found out from runs on different numbers of rows.

A module that is run on some rows whole and in two uneven parts shows for each leaf of its output what the
parts have to do with the whole. Sizes that follow the rows are rows, whatever the values; one-element values
are a mean or a sum if the values say so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from evenly.outputs import (
    Constant,
    Mean,
    OutputRule,
    PackedRows,
    Rows,
    SampleList,
    Sum,
    Unknown,
    is_number,
    same_value,
    short,
)
from evenly.structure import LEAF, Tree, describe, flatten, same_node, unpack

# How far apart the whole and its parts may be, relative to the largest value: kernels differ with the batch
# size.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float64: 1e-8, torch.complex128: 1e-8}
_DEFAULT_TOLERANCE = 1e-4
# The root of a mean, say, is nearly the mean of the roots when the rows are alike: sums must agree as well as the
# promise demands.
_SUM_TOLERANCE = {**_TOLERANCE, torch.float32: 5e-6, torch.complex64: 5e-6}

NOT_FINITE = "it was not finite"
_ONE_RUN = "one run does not tell a mean from a sum"
_EVEN = "all replicas had equally many rows, so that any size could follow them"
_PAIRWISE = "each of its rows depends on all others (two of its dimensions follow the rows)"


def infer_rules(
    whole: Any, part_a: Any, part_b: Any, rows: tuple[int, int], *, again: Any = ...
) -> tuple[list[OutputRule], Tree]:
    """Finds the rule of every leaf of an output from three runs of the module.

    Args:
        whole: The output for a + b rows.
        part_a: The output for the first a rows.
        part_b: The output for the last b rows.
        rows: (a, b), both positive and different.
        again: The output for all rows a second time, if the module was run again. When it equals the first,
            values are not random, and rows that come out otherwise in the parts are known to depend on each
            other.

    Returns:
        One rule per leaf and the tree of the output, in which a list that follows the rows is one leaf: take
        the leaves of other outputs with `leaves, full = tree.fit(output, "output")`; rebuild with `full`.

    Raises:
        ValueError: If the three outputs have different structures, or None in different places; it names the
            path.
    """
    counts = (rows[0] + rows[1], *rows)
    if rows[0] < 1 or rows[1] < 1 or rows[0] == rows[1]:
        raise ValueError(f"the two parts must have different numbers of rows, at least one each, got {rows}")
    rules: list[OutputRule] = []
    tree = _infer([whole, part_a, part_b], "output", counts, rules, again)
    return rules, tree.without_values()


def rules_from_shapes(outputs: Sequence[Any], rows: Sequence[int]) -> tuple[list[OutputRule], Tree]:
    """Finds the rules from the outputs of all replicas alone, when the module could not be probed.

    Args:
        outputs: One output per replica; tensors may be on the meta device, since only their shapes count.
        rows: Rows of each replica. Only uneven rows tell which size follows them.

    Returns:
        As `infer_rules`. A one-element tensor is `Unknown` with the candidates mean and sum; so is a tensor
        whose shape fits several rules, with those.

    Raises:
        ValueError: As `infer_rules`.
    """
    rules: list[OutputRule] = []
    tree = _infer(list(outputs), "output", tuple(rows), rules, ..., by_shape=True)
    return rules, tree.without_values()


def _infer(
    values: list[Any],
    path: str,
    counts: Sequence[int],
    rules: list[OutputRule],
    again: Any,
    by_shape: bool = False,
) -> Tree:
    if any(value is None for value in values) and not all(value is None for value in values):
        missing = [count for value, count in zip(values, counts, strict=True) if value is None]
        raise ValueError(f"{path} is None for {missing} rows, but not for {list(counts)}: it must be None always")
    nodes = [unpack(value, objects=True) for value in values]
    opened = [node for node in nodes if node is not None]
    if len(opened) == len(values):
        sizes = [len(node.children) for node in opened]
        if all(type(value) in {list, tuple, deque} and type(value) is type(values[0]) for value in values):
            factor, uneven = _factor(sizes, counts), len(set(counts)) > 1
            if factor and (uneven or not any(map(_holds_tensors, values))):
                rules.append(SampleList(factor) if uneven else Unknown(_EVEN, (SampleList(factor), Constant())))
                return LEAF
        first = opened[0].tree
        other = next((node.tree for node in opened if not same_node(first, node.tree)), None)
        if other is not None:
            raise ValueError(
                f"{path} is {describe(first)} for {counts[0]} rows, and {describe(other)} for other rows: "
                f"{list(sizes)} entries for {list(counts)} rows. The structure must not depend on the rows, "
                "except for lists with one item per row"
            )
        repeat = None if again is ... else unpack(again, objects=True)
        if repeat is None or not same_node(first, repeat.tree):
            repeats: Sequence[Any] = [...] * sizes[0]
        else:
            repeats = repeat.children
        return opened[0].close(
            [
                _infer(
                    [node.children[i] for node in opened],
                    path + first.step(key),
                    counts,
                    rules,
                    repeats[i],
                    by_shape,
                )
                for i, key in enumerate(first.keys)
            ]
        )
    if opened or len({_family(value) for value in values}) > 1:
        kinds = [type(value).__name__ for value in values]
        raise ValueError(f"{path} is of the types {kinds} for {list(counts)} rows: it must be the same always")
    rules.append(_shape_rule(values, counts) if by_shape else _leaf_rule(values, counts, again))
    return LEAF


def _holds_tensors(value: Any) -> bool:
    leaves, _ = flatten(value, objects=True)
    return any(isinstance(leaf, (torch.Tensor, PackedSequence)) for leaf in leaves)


def _family(value: Any) -> type[Any]:
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return torch.Tensor if isinstance(value, torch.Tensor) else PackedSequence
    return float if is_number(value) else cast("type[Any]", type(value))


def _leaf_rule(values: list[Any], counts: Sequence[int], again: Any) -> OutputRule:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return _tensor_rule(values, counts, again)
    if isinstance(first, PackedSequence):
        return _packed_rule(values, counts)
    if is_number(first):
        return _number_rule([torch.tensor(float(value), dtype=torch.float64) for value in values], counts, first)
    if all(same_value(first, value) for value in values) or isinstance(first, torch.device):
        return Constant()
    return Unknown(_differs(values, counts))


def _shape_rule(values: list[Any], counts: Sequence[int]) -> OutputRule:
    first = values[0]
    if isinstance(first, PackedSequence):
        return _packed_rule(values, counts)
    if isinstance(first, torch.Tensor):
        return _tensor_shape_rule(values, counts)
    if is_number(first):
        return Unknown(_ONE_RUN, (Constant(), Sum()))
    return Constant() if all(same_value(first, value) for value in values) else Unknown(_differs(values, counts))


def _tensor_shape_rule(values: list[torch.Tensor], counts: Sequence[int]) -> OutputRule:
    first, uneven = values[0], len(set(counts)) > 1
    dims = [d for d in range(first.ndim) if all(value.ndim == first.ndim for value in values)]
    dims = [d for d in dims if _factor([value.shape[d] for value in values], counts)]
    rules: list[OutputRule] = [Rows(dim, first.shape[dim] // counts[0]) for dim in dims]
    if rules and uneven:
        return rules[0] if len(rules) == 1 else Unknown(_PAIRWISE, mixed=True)
    if rules:
        return Unknown(_EVEN, (*rules, Constant()))
    if any(value.shape != first.shape for value in values):
        return Unknown(_differs(values, counts))
    if first.numel() != 1:
        return Constant()
    return Unknown(_ONE_RUN, (Constant(), Sum()) if _is_integral(first) else (Mean(), Sum()))


def _packed_rule(values: list[PackedSequence], counts: Sequence[int]) -> OutputRule:
    sizes = [int(value.batch_sizes[0]) for value in values]
    return PackedRows() if sizes == list(counts) else Unknown(f"it has {sizes} samples for {list(counts)} rows")


def _tensor_rule(values: list[torch.Tensor], counts: Sequence[int], again: Any) -> OutputRule:
    whole, *parts = values
    if len({value.ndim for value in values}) > 1:
        return Unknown(_differs(values, counts))
    dims = [dim for dim in range(whole.ndim) if _factor([value.shape[dim] for value in values], counts)]
    if len(dims) > 1:
        return Unknown(_PAIRWISE, mixed=True)
    if not dims:
        if any(part.shape != whole.shape for part in parts):
            return Unknown(_differs(values, counts))
        return _number_rule(values, counts, whole)
    dim = dims[0]
    rule = Rows(dim, whole.shape[dim] // counts[0])
    others = [(value.shape[:dim], value.shape[dim + 1 :]) for value in values]
    if any(other != others[0] for other in others):
        longest = [max(part.shape[d] for part in parts) for d in range(whole.ndim) if d != dim]
        # Padded to the longest of its rows: fits whenever the replicas happen to agree, which is checked at
        # each call.
        padded = longest == [size for d, size in enumerate(whole.shape) if d != dim]
        return rule if padded else Unknown(_differs(values, counts))
    joined = torch.cat(parts, dim)
    if close(whole, joined):
        return rule
    if whole.layout is torch.strided and not whole.is_complex() and close(_ordered(whole), _ordered(joined)):
        reason = "its rows do not lie one after the other (the batch must come first when dimensions are merged)"
        return Unknown(reason, mixed=True)
    if isinstance(again, torch.Tensor) and close(whole, again):
        return Unknown("the values of its rows depend on the other rows of the batch", mixed=True)
    return rule


def _number_rule(values: list[torch.Tensor], counts: Sequence[int], example: Any) -> OutputRule:
    """The rule of a tensor without rows, or of a Python number."""
    whole, a, b = (value.detach() for value in values)
    integral = _is_integral(example)
    equal = close(whole, a, _SUM_TOLERANCE) and close(whole, b, _SUM_TOLERANCE)
    if whole.dtype is torch.bool:
        return Constant() if equal else Unknown(_differs(values, counts))
    if whole.numel() == 1 and not all(bool(value.isfinite().all()) for value in values):
        return Unknown(NOT_FINITE, (Constant(), Sum()) if integral else (Mean(), Sum()))
    if whole.numel() and not any(bool((value != 0).any()) for value in values):
        candidates: tuple[OutputRule, ...] = (Constant(), Sum()) if integral else (Constant(), Mean(), Sum())
        return Unknown("it was 0 for all rows, which may be a constant, a mean or a sum", candidates)
    if equal:
        # A mean that happens to be equal (an accuracy of 1) must not be refused later as a changing constant,
        # and for a real constant the mean is right as well, gradients included.
        return Mean(sure=False) if whole.numel() == 1 and not integral else Constant()
    n, n_a, n_b = counts
    fits: list[OutputRule] = []
    if not integral and close(whole, (a * n_a + b * n_b) / n, _SUM_TOLERANCE):
        fits.append(Mean())
    if close(whole, a + b, _SUM_TOLERANCE):
        fits.append(Sum())
    if len(fits) == 1:
        return fits[0]
    if fits:
        return Unknown("its values fit a mean and a sum", tuple(fits))
    return Unknown(
        _differs(values, counts) + ", which is no mean and no sum over rows. If it is divided by something that all "
        "rows share, divide by evenly.whole_batch(...) of it"
    )


def _is_integral(example: Any) -> bool:
    if isinstance(example, torch.Tensor):
        return not example.is_floating_point() and not example.is_complex()
    return isinstance(example, int)


def _factor(sizes: Sequence[int], counts: Sequence[int]) -> int:
    """How many entries there are per row, 0 when the sizes do not follow the rows."""
    factor = sizes[0] // counts[0]
    return factor if all(size == factor * count for size, count in zip(sizes, counts, strict=True)) else 0


def close(left: torch.Tensor, right: torch.Tensor, tolerances: Mapping[torch.dtype, float] = _TOLERANCE) -> bool:
    """Whether two tensors are equal up to the differences of kernels for other batch sizes; NaN is NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (x.detach().to_dense() if x.layout is not torch.strided else x.detach() for x in (left, right))
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    tolerance = tolerances.get(left.dtype, _DEFAULT_TOLERANCE)
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    finite = torch.cat([left.flatten(), right.flatten()]).abs().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _ordered(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().flatten()
    return (flat.double() if flat.is_floating_point() else flat).sort().values


def _differs(values: Sequence[Any], counts: Sequence[int]) -> str:
    shown = [
        f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) and value.numel() != 1 else short(value)
        for value in values
    ]
    return f"it was {', '.join(shown)} for {', '.join(map(str, counts))} rows"
