"""What a user says about an argument: given whole, one item per row, or rows along another dimension.

The markers `replicate` and `samples` stand around a value; `in_dims` is turned into markers as well, so that
the rules for splitting know one way only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from evenly.structure import flatten, unpack

InDims = Any
"""An int, "samples", or a tuple (positional) or dict (by name) of nested ints, None, "samples" and `...`."""

_ENTRY = 'an int (the dimension of its rows), None (given whole), "samples" (one item per row) or ... (found out)'


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
        remedy = (
            "a tensor is cut along its batch dimension without any mark, or along the one that in_dims= gives"
            if isinstance(items, torch.Tensor)
            else "make a list of it"
        )
        raise TypeError(f"evenly.samples takes a sequence with one item per row, got {a_kind_of(items)}: {remedy}")
    return Samples(items)


def unmarked(value: Any) -> Any:
    """A value as the module receives it: without marks, wherever they are. The same object if there are none."""
    if isinstance(value, Marker):
        return unmarked(value.value)
    leaves, tree = flatten(value, is_leaf=is_marker)
    if not any(isinstance(leaf, Marker) for leaf in leaves):
        return value
    return tree.rebuild([unmarked(leaf) if isinstance(leaf, Marker) else leaf for leaf in leaves])


def a_kind_of(value: Any) -> str:
    """The type of a value, for an error message."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def in_dims_of_call(
    in_dims: Mapping[Any, Any], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Any, Any]:
    """What `in_dims` says about the arguments of one call, however they are given.

    An argument that `forward` has can be named whether it is given by position or by keyword, and need not be given
    in every call.

    Raises:
        ValueError: If `forward` has no argument of a name.
    """
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # some callables do not tell
        return dict(in_dims)
    kinds = inspect.Parameter
    by_position = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in {kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD}
    ]
    found: dict[Any, Any] = {}
    for key, spec in in_dims.items():
        place = by_position.index(key) if key in by_position else key
        name = by_position[place] if isinstance(place, int) and 0 <= place < len(by_position) else key
        if place in range(len(args)):
            found[place] = spec
        elif name in kwargs:
            found[name] = spec
        elif name not in parameters:
            raise ValueError(
                f"in_dims names {key!r}, but this call gives no such argument and forward{inspect.signature(forward)} "
                "does not have it"
            )
    return found


def mark_call(args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: InDims) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turns `in_dims` into markers around the arguments it is about."""
    if isinstance(in_dims, Mapping):
        entries = dict(cast("Mapping[int | str, Any]", in_dims))
        unknown = [key for key in entries if key not in kwargs and key not in range(len(args))]
        if unknown:
            raise ValueError(
                f"in_dims names {unknown!r}, but the call has {_count(len(args), 'positional argument')} and "
                f"{f'the keywords {list(kwargs)}' if kwargs else 'no keywords'}"
            )
    elif isinstance(in_dims, (tuple, list)):
        dims = cast("Sequence[Any]", in_dims)
        if len(dims) != len(args):
            raise ValueError(
                f"in_dims has {_count(len(dims), 'entry', 'entries')}, but the call has "
                f"{_count(len(args), 'positional argument')}: give one for each, or a dict of those that it is about"
            )
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
    if isinstance(value, Marker) or spec is ...:
        return value
    if spec is None:
        return Replicated(value)
    if spec == "samples":
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise ValueError(
                f'in_dims gives "samples" for {path}, but that is {a_kind_of(value)}: only a sequence, a list for '
                "example, has one item per row"
            )
        return Samples(cast("Sequence[Any]", value))
    if isinstance(spec, int) and not isinstance(spec, bool):
        _check_dim(value, spec, path)
        return Along(value, spec)
    entries, node = unpack(spec), unpack(value)
    if entries is None:
        raise ValueError(f"in_dims gives {spec!r} for {path}: it takes {_ENTRY}, or a structure of these")
    if node is None:
        raise ValueError(f"in_dims gives {spec!r} for {path}, but that is {a_kind_of(value)}: it takes {_ENTRY}")
    # A plain tuple fits a namedtuple or a dataclass by position.
    keys = node.tree.keys if type(spec) in {list, tuple} else entries.tree.keys
    specs = dict(zip(keys, entries.children, strict=False))
    if not isinstance(spec, Mapping) and len(entries.children) != len(node.children):
        raise ValueError(
            f"in_dims gives {spec!r} for {path}, {_count(len(entries.children), 'entry', 'entries')} for "
            f"{a_kind_of(value)} of {len(node.children)}"
        )
    if unknown := [key for key in specs if key not in node.tree.keys]:
        raise ValueError(f"in_dims names {unknown} in {path}, which has only {list(node.tree.keys)}")
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


def _count(number: int, word: str, words: str | None = None) -> str:
    return f"{number} {word if number == 1 else words or word + 's'}"
