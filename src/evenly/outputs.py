"""How the outputs of all replicas become the output for the whole batch.

Every leaf of an output has a rule: rows side by side, a constant, a mean, a sum. This module is the rules,
what they check and how they join; `evenly.probe` finds out which rule holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch

from evenly.structure import Tree, unpack

Shape: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class Rows:
    """A tensor with `factor` entries per row along `dim` (more than one when flattened as `[N * T, ...]`)."""

    dim: int
    factor: int = 1


@dataclass(frozen=True)
class Constant:
    """The same on all replicas, whatever the rows."""


@dataclass(frozen=True)
class Mean:
    """A mean over rows: the whole's is the mean of all replicas' weighted by their rows.

    Attributes:
        sure: Whether anything else has been ruled out. A value that was the same for all rows seen so far may be
            anything: then it is a mean only for as long as it stays the same on all replicas.
    """

    sure: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Sum:
    """A sum over rows: the whole's is the sum of all replicas'."""


@dataclass(frozen=True)
class Stack:
    """One entry per replica, stacked along a new first dimension."""


@dataclass(frozen=True)
class SampleList:
    """A list, tuple or deque with `factor` items per row."""

    factor: int = 1


@dataclass(frozen=True)
class PackedRows:
    """A `PackedSequence` with one sample per row."""


@dataclass(frozen=True)
class Unknown:
    """No rule holds, or several do.

    Attributes:
        reason: What is known instead, as the end of the sentence "…, because".
        candidates: Rules that all fit what was seen. Where they agree on the values at hand (all of them 0,
            say), the leaf can be joined all the same.
        mixed: Whether it has been proven that rows depend on each other: no way of joining is right then.
    """

    reason: str
    candidates: tuple[OutputRule, ...] = ()
    mixed: bool = False


OutputRule: TypeAlias = "Rows | Constant | Mean | Sum | Stack | SampleList | PackedRows | Unknown"

SCALAR_RULES: Mapping[str, OutputRule] = {"mean": Mean(), "sum": Sum(), "stack": Stack()}

_REMEDIES = (
    "Say how it depends on the batch with out_dims= (a dimension, or None for a constant) or "
    'scalar_outputs= ("mean", "sum" or "stack")'
)
_UNMIX = (
    "Compute outside of forward what rows have to do with each other; if it is an argument that belongs to all rows "
    "and has been cut, pass evenly.replicate(...) around it"
)


def check_tensor_metas(
    path: str, rule: OutputRule, metas: Sequence[tuple[Sequence[int], torch.dtype]], rows: Sequence[int]
) -> Shape:
    """Checks that one tensor of the output can be joined, knowing only what it looks like on each replica.

    Args:
        path: The path of the leaf, as in `output[0]`.
        rule: The leaf's rule.
        metas: Shape and dtype on each replica; for `PackedRows`, of `.data`.
        rows: Rows of each replica.

    Returns:
        The shape for the whole batch.

    Raises:
        ValueError: If shapes or dtypes do not fit the rule; it says which dimension, on which replica, and
            what to do.
    """
    shapes = _check_alike(path, metas)
    if isinstance(rule, Unknown):
        if not rule.candidates or any(isinstance(candidate, Rows) for candidate in rule.candidates):
            # Whatever the values: as rows they would be side by side, and so of another shape.
            raise ValueError(_unknown(path, rule))
        rule = rule.candidates[0]
    if isinstance(rule, SampleList):
        raise ValueError(f"{path} is a tensor, expected a list with one item per row")  # noqa: TRY004
    along = rule.dim if isinstance(rule, Rows) else 0 if isinstance(rule, PackedRows) else None
    _check_other_dims(path, shapes, along)
    if along is None:
        return (len(shapes), *shapes[0]) if isinstance(rule, Stack) else shapes[0]
    if isinstance(rule, Rows):
        for replica, (shape, count) in enumerate(zip(shapes, rows, strict=True)):
            if shape[along] != count * rule.factor:
                raise ValueError(
                    f"{path} has size {shape[along]} along dimension {along} on replica {replica} (shape "
                    f"{list(shape)}), expected {count * rule.factor} for its {count} rows. {_REMEDIES}"
                )
    return (*shapes[0][:along], sum(shape[along] for shape in shapes), *shapes[0][along + 1 :])


def _check_alike(path: str, metas: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Shape]:
    shapes = [tuple(shape) for shape, _ in metas]
    for replica, (_, dtype) in enumerate(metas):
        if dtype != metas[0][1]:
            raise ValueError(f"{path} is {metas[0][1]} on replica 0 and {dtype} on replica {replica}")
        if len(shapes[replica]) != len(shapes[0]):
            raise ValueError(
                f"{path} has {len(shapes[0])} dimensions on replica 0 (shape {list(shapes[0])}) and "
                f"{len(shapes[replica])} on replica {replica} (shape {list(shapes[replica])})"
            )
    return shapes


def _check_other_dims(path: str, shapes: Sequence[Shape], along: int | None) -> None:
    if along is not None and along >= len(shapes[0]):
        raise ValueError(f"{path} has no dimension {along} for its rows (shape {list(shapes[0])}). {_REMEDIES}")
    for replica, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if dim == along or size == shapes[0][dim]:
                continue
            if along is None:
                raise ValueError(
                    f"{path} has shape {list(shapes[0])} on replica 0 and {list(shape)} on replica "
                    f"{replica}, but it has no dimension that follows the rows. {_REMEDIES}"
                )
            raise ValueError(
                f"{path} has size {shapes[0][dim]} along dimension {dim} on replica 0 and {size} on replica "
                f"{replica}, so the rows do not fit together. Padding to the longest of a shard does this: "
                "pad to a length that all replicas know, with total_length= of pad_packed_sequence for "
                "example"
            )


def check_and_join_values(path: str, rule: OutputRule, values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Joins one leaf of the output that is no tensor: None, a number, a string, a list that follows the rows.

    Args:
        path: The path of the leaf, as in `output["names"]`.
        rule: The leaf's rule.
        values: The value on each replica.
        rows: Rows of each replica.

    Returns:
        The value for the whole batch.

    Raises:
        ValueError: If the values do not fit the rule; it names two of them and their replicas.
    """
    if isinstance(rule, SampleList):
        return _join_lists(path, rule, values, rows)
    if isinstance(rule, Stack):
        return list(values)
    first = values[0]
    # Where a replica runs is no part of its result.
    if isinstance(first, torch.device) and all(isinstance(value, torch.device) for value in values):
        return first
    different = next((replica for replica, value in enumerate(values) if not same_value(first, value)), None)
    if different is None and (len(values) == 1 or _equal_values_decide(rule, first)):
        return first
    if all(is_number(value) for value in values):
        if isinstance(rule, Sum):
            return sum(values)
        if isinstance(rule, Mean):
            return math.fsum(value * count for value, count in zip(values, rows, strict=True)) / sum(rows)
    if isinstance(rule, Unknown) and not any(value is None for value in values):
        raise ValueError(_unknown(path, rule))
    replica = different or 1
    raise ValueError(
        f"{path} is {short(first)} on replica 0 and {short(values[replica])} on replica {replica}. A value "
        "without rows must be the same on all replicas. "
        f"{_REMEDIES if is_number(first) else 'Return it per row, in a list'}"
    )


def _equal_values_decide(rule: OutputRule, value: Any) -> bool:
    """Whether a value that is the same on all replicas is that of the whole by every possible rule."""
    if not isinstance(rule, Unknown):
        return not isinstance(rule, Sum)
    if any(isinstance(candidate, SampleList) for candidate in rule.candidates):
        return False  # as items of rows they would be one after the other
    return bool(rule.candidates) and (Sum() not in rule.candidates or value == 0 or same_value(value, math.nan))


def _join_lists(path: str, rule: SampleList, values: Sequence[Any], rows: Sequence[int]) -> Any:
    kind = cast("type[Any]", type(values[0]))
    joined: list[Any] = []
    for replica, (value, count) in enumerate(zip(values, rows, strict=True)):
        if type(value) is not kind or kind not in {list, tuple, deque} or len(value) != count * rule.factor:
            size = f" of {len(value)}" if hasattr(value, "__len__") else ""
            raise ValueError(
                f"{path} is a {type(value).__name__}{size} on replica {replica}, expected a {kind.__name__} "
                f"of {count * rule.factor} for its {count} rows"
            )
        joined.extend(cast("Sequence[Any]", value))
    return cast("Any", kind)(joined)


def override_rules(
    tree: Tree,
    leaves: Sequence[Any],
    rules: Sequence[OutputRule],
    *,
    out_dims: Any = ...,
    scalar_outputs: Any = None,
) -> list[OutputRule]:
    """The rules with what the user said in their place.

    Args:
        tree: The structure of the output.
        leaves: One replica's leaves, to tell tensors, scalars and other values apart.
        rules: What was found out.
        out_dims: An int, None (a constant), or a nested structure of them like the output. It is about
            tensors with dimensions; a dict needs to name only some keys, and `...` says nothing.
        scalar_outputs: "mean", "sum" or "stack", or a structure of them. It is about 0-dim and one-element
            tensors that have no rows, and numbers. None says nothing.

    Raises:
        ValueError: If a structure does not fit the output, or a word or a dimension does not exist.
    """
    result = list(rules)
    for place, spec, path, _ in _broadcast("out_dims", tree, out_dims, "output", 0):
        if spec is not ...:
            result[place] = _rule_along(spec, leaves[place], result[place], path)
    for place, spec, path, alone in _broadcast("scalar_outputs", tree, scalar_outputs, "output", 0):
        if spec is None:
            continue
        if spec not in SCALAR_RULES:
            raise ValueError(f'scalar_outputs gives {spec!r} for {path}: "mean", "sum" and "stack" are possible')
        leaf = leaves[place]
        one = isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and not isinstance(result[place], Rows)
        if one or is_number(leaf):
            result[place] = SCALAR_RULES[spec]
        elif (
            alone
            and isinstance(leaf, torch.Tensor)
            and not isinstance(result[place], (Rows, Constant))
            and result[place] != SCALAR_RULES[spec]
        ):
            raise ValueError(
                f"scalar_outputs gives {spec!r} for {path}, which has shape {list(leaf.shape)}: it is about single "
                "numbers. Where the rows of a tensor are is said by out_dims=; a statistic of the batch comes from "
                "evenly.whole_batch(...) in forward"
            )
    return result


def _rule_along(spec: Any, leaf: Any, found: OutputRule, path: str) -> OutputRule:
    """The rule of a leaf about which ``out_dims`` says something."""
    if spec is None:
        return Constant()
    if not isinstance(leaf, torch.Tensor):
        return _as_list(found) if spec == 0 else found
    if leaf.ndim == 0:
        return found
    if isinstance(spec, bool) or not isinstance(spec, int) or not -leaf.ndim <= spec < leaf.ndim:
        raise ValueError(
            f"out_dims gives {spec!r} for {path}, which has shape {list(leaf.shape)}: it takes the dimension of "
            "the rows, None (the same on all replicas) or ... (found out)"
        )
    dim = spec % leaf.ndim
    if isinstance(found, Unknown) and found.mixed:
        raise ValueError(
            f"out_dims gives {dim} for {path}, but joined like this it would be another value than that of the module "
            f"on the whole batch, because {found.reason}. {_UNMIX}"
        )
    return found if isinstance(found, Rows) and found.dim == dim else Rows(dim)


def _as_list(rule: OutputRule) -> OutputRule:
    """The rule of a list with one item per row, where it may be one."""
    candidates = rule.candidates if isinstance(rule, Unknown) else ()
    return next((candidate for candidate in candidates if isinstance(candidate, SampleList)), rule)


def _broadcast(argument: str, tree: Tree, spec: Any, path: str, place: int) -> list[tuple[int, Any, str, bool]]:
    """For each leaf its number, its part of the specification, its path, and whether that part is for it alone."""
    node = None if isinstance(spec, str) else unpack(spec)
    if node is None:
        return [(place + i, spec, leaf_path, tree.is_leaf) for i, leaf_path in enumerate(tree.paths(path))]
    plain = type(spec) in {list, tuple}
    specs = dict(zip(tree.keys if plain else node.tree.keys, node.children, strict=False))
    unknown = [key for key in specs if key not in tree.keys]
    partial = isinstance(spec, Mapping)
    if tree.type is None:
        raise ValueError(f"{argument} gives {spec!r} for {path}, which has no parts")
    if not partial and len(node.children) != len(tree.keys):
        raise ValueError(
            f"{argument} gives {spec!r} for {path}, which is of type {tree.type.__name__} and has the parts "
            f"{list(tree.keys)}"
        )
    if unknown:
        raise ValueError(f"{argument} names {unknown} in {path}, which has only {list(tree.keys)}")
    found: list[tuple[int, Any, str, bool]] = []
    for key, child in zip(tree.keys, tree.children, strict=True):
        if key in specs:
            found += _broadcast(argument, child, specs[key], path + tree.step(key), place)
        place += child.count
    return found


def is_number(value: Any) -> bool:
    """Whether a value is a Python int or float (a bool is neither)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def same_value(left: Any, right: Any) -> bool:
    """Whether two Python values are equal; NaN equals NaN, and what cannot be compared is not equal."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and math.isnan(left) and math.isnan(right):
        return True
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):
        return False


def short(value: Any) -> str:
    """A value in an error message."""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value.item()) if isinstance(value, torch.Tensor) and value.numel() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004


def _unknown(path: str, rule: Unknown) -> str:
    if rule.mixed:
        return f"{path} cannot be joined over the replicas, because {rule.reason}. {_UNMIX}"
    return f"{path} cannot be joined over the replicas, because {rule.reason}. {_REMEDIES}"
