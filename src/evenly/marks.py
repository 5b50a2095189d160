"""What a user says about an argument: given whole, one item per row, or rows along another dimension.

The markers `replicate` and `samples` stand around a value; `in_dims` is turned into markers as well, so that
the rules for splitting know one way only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from evenly.structure import flatten, unpack

InDims = Any
"""An int, "samples", or a tuple (positional) or dict (by name) of nested ints, None and "samples"."""


@dataclass(frozen=True, eq=False)
class Marker:
    """What the user said about a value, around the value."""

    value: Any


class Replicated(Marker):
    """The value goes to each replica whole."""


class Samples(Marker):
    """The value is a sequence with one item per row."""


@dataclass(frozen=True, eq=False)
class Along(Marker):
    """The tensors in the value have their rows along `dim`."""

    dim: int


def is_marker(value: Any) -> bool:
    """Whether a value is a marker."""
    return isinstance(value, Marker)


def replicate(value: Any) -> Any:
    """Marks an argument that belongs to the batch as a whole: each replica gets all of it.

    Args:
        value: Anything, nested values of tensors included. The module receives the value without the mark.
    """
    return Replicated(value)


def samples(items: Sequence[Any]) -> Any:
    """Marks a Python sequence with one item per row of the batch: each replica gets the items of its rows.

    Args:
        items: A list or tuple (its type is kept), or another sequence (replicas get lists). Items may be
            tensors of different shapes, dicts, strings, anything. The module receives them without the mark.

    Raises:
        TypeError: If it is a tensor, a string or no sequence.
    """
    if isinstance(items, (str, bytes)) or not isinstance(cast("Any", items), Sequence):
        raise TypeError(f"evenly.samples takes a sequence with one item per row, got a {type(items).__name__}")
    return Samples(items)


def mark_call(args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: InDims) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turns `in_dims` into markers around the arguments it is about."""
    if isinstance(in_dims, Mapping):
        entries = dict(cast("Mapping[int | str, Any]", in_dims))
        unknown = [key for key in entries if key not in kwargs and key not in range(len(args))]
        if unknown:
            raise ValueError(
                f"in_dims names {unknown!r}, but the call has {len(args)} positional arguments and the "
                f"keywords {list(kwargs)}"
            )
    elif isinstance(in_dims, (tuple, list)):
        dims = cast("Sequence[Any]", in_dims)
        if len(dims) != len(args):
            raise ValueError(f"in_dims has {len(dims)} entries, but the call has {len(args)} positional arguments")
        entries = dict(enumerate(dims))
    else:
        entries = dict.fromkeys([*range(len(args)), *kwargs], in_dims)
    entries = cast("dict[Any, Any]", entries)
    marked = tuple(_mark(value, entries[i], f"args[{i}]") if i in entries else value for i, value in enumerate(args))
    named = {
        key: _mark(value, entries[key], f'kwargs["{key}"]') if key in entries else value
        for key, value in kwargs.items()
    }
    return marked, named


def _mark(value: Any, spec: Any, path: str) -> Any:
    if isinstance(value, Marker):
        return value
    if spec is None:
        return Replicated(value)
    if spec == "samples":
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise ValueError(f'in_dims gives "samples" for {path}, but that is a {type(value).__name__}: no sequence')
        return Samples(cast("Sequence[Any]", value))
    if isinstance(spec, int) and not isinstance(spec, bool):
        _check_dim(value, spec, path)
        return Along(value, spec)
    entries, node = unpack(spec), unpack(value)
    if entries is None or node is None:
        raise ValueError(f'in_dims gives {spec!r} for {path}: an int, None, "samples" or a structure of them fits')
    # A plain tuple fits a namedtuple or a dataclass by position.
    keys = node.tree.keys if type(spec) in {list, tuple} else entries.tree.keys
    specs = dict(zip(keys, entries.children, strict=False))
    fits = isinstance(spec, Mapping) or len(entries.children) == len(node.children)
    if not fits or not specs.keys() <= set(node.tree.keys):
        raise ValueError(f"in_dims gives {spec!r} for {path}, which has {list(node.tree.keys)}")
    children = [
        _mark(child, specs[key], child_path) if key in specs else child
        for key, child, child_path in zip(node.tree.keys, node.children, node.paths(path), strict=True)
    ]
    return node.tree.rebuild(children)


def _check_dim(value: Any, dim: int, path: str) -> None:
    leaves, tree = flatten(value, is_leaf=is_marker)
    for leaf, leaf_path in zip(leaves, tree.paths(path), strict=True):
        if isinstance(leaf, torch.Tensor) and not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(
                f"in_dims gives dimension {dim} for {leaf_path}, which has {leaf.ndim} dimensions "
                f"(shape {list(leaf.shape)})"
            )
