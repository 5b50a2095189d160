"""How a batch is split: which arguments are cut along which dimension, and what each replica is given.

The rules: the first tensor says how many rows the batch has. Every tensor of that size along the batch
dimension is cut, one without such a dimension is given to every replica whole, and what fits neither is
refused, because a guess would drop rows silently. Nothing here knows of processes; shards are views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch.nn.utils.rnn import PackedSequence

from evenly.containers import ATOMS
from evenly.marks import Along, InDims, Marker, Samples, is_marker, mark_call, replicate, samples, unmarked
from evenly.parts import Items, Packed, Part, TensorLeaf, Unit, Whole, cut
from evenly.rows import split_rows
from evenly.structure import LEAF, Tree, flatten, is_record, unpack

__all__ = ["SplitPlan", "plan_split", "replicate", "samples", "split_rows"]


class SplitPlan:
    """What each replica is given of one call's arguments.

    Attributes:
        size: Rows of the batch; None when nothing in the arguments has rows.
        dim: The batch dimension where nothing else was said.
        rows: Rows of each replica that takes part, from replica 0 on. `(1,)` when `size` is None: one call on
            replica 0.
        leaves: One unit per argument part, in order, with its `path` and `treatment`: "split", "whole",
            "samples" (a list cut item by item) or "object" (a Python value; the driver's own goes to replica
            0, others need a copy).
    """

    def __init__(
        self,
        *,
        size: int | None,
        dim: int,
        rows: tuple[int, ...],
        tree: Tree,
        leaves: list[Unit],
        call: tuple[tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        self.size = size
        self.dim = dim
        self.rows = rows
        self.leaves = leaves
        self._tree = tree
        self._call = call
        self._tensor_leaves = [leaf for unit in leaves for leaf in unit.tensors]
        ends = list(accumulate(rows))
        self._parts = [
            Part(end - count, end, replica, rows) for replica, (end, count) in enumerate(zip(ends, rows, strict=True))
        ]

    @property
    def replicas(self) -> int:
        """How many replicas take part."""
        return len(self.rows)

    @property
    def tensors_only(self) -> bool:
        """Whether the arguments are tensors given by position, and nothing else."""
        return self._tree.is_call

    def tensor_leaves(self) -> list[TensorLeaf]:
        """All tensors of the arguments in order; a packed sequence counts as its `.data`."""
        return self._tensor_leaves

    def cut(self, leaf: TensorLeaf, replica: int) -> torch.Tensor | None:
        """The replica's part of one tensor: a view, or the tensor itself if it is given whole.

        Steps of packed sequences and rows of sparse tensors are copied. None for a tensor inside an item of a
        per-sample list that goes to another replica.
        """
        return cut(leaf, self._parts[replica])

    def shard(self, replica: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one replica: views of tensors, other Python values as the same objects."""
        part = self._parts[replica]
        return self._build(part, [cut(leaf, part) for leaf in self._tensor_leaves])

    def build(self, replica: int, tensors: Sequence[torch.Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one replica around other tensors than `cut` would give.

        Args:
            replica: Which shard.
            tensors: One per tensor leaf, in order; None where `cut` gives None.
        """
        return self._build(self._parts[replica], tensors)

    def select(self, rows: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for any rows of the batch, in the given order."""
        part = Part.of_rows(rows)
        return self._build(part, [cut(leaf, part) for leaf in self._tensor_leaves])

    def merge(self, leaf: TensorLeaf, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Puts what belongs to the parts of a tensor, gradients above all, together for the whole tensor.

        Args:
            leaf: One of `tensor_leaves()`.
            parts: One per replica, all on one device, None for nothing (a gradient of zeros).

        Returns:
            The parts side by side in their rows; their sum for a tensor that was given whole; None if all are
            None.
        """
        return leaf.merge(parts, self._parts)

    def _build(self, part: Part, tensors: Sequence[torch.Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A module that runs alone gets what the user gave: what it appends to or fills is the user's.
        alone = len(self.rows) == 1 and part.replica == 0
        if alone and self._call is not None and _same_tensors(tensors, self._tensor_leaves):
            return self._call
        if self._tree.is_call:
            return tuple(tensors), {}
        given = iter(tensors)
        return self._tree.rebuild([unit.build(part, [next(given) for _ in unit.tensors]) for unit in self.leaves])


def plan_split(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    devices: int,
    dim: int = 0,
    weights: Sequence[float] | None = None,
    in_dims: InDims = None,
    min_rows: int = 1,
) -> SplitPlan:
    """Finds out how the arguments of a call are split.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        devices: Number of replicas there are; fewer take part when there are fewer rows.
        dim: The batch dimension of tensors about which `in_dims` says nothing.
        weights: Proportions of rows, see `split_rows`.
        in_dims: As in `torch.vmap`, what the rows of each argument are: an int for the dimension of a tensor
            (of all tensors in a container), None for an argument given whole, "samples" for a sequence with
            one item per row, `...` for what the rules say. A tuple or list has one entry per positional
            argument, and keyword arguments follow the rules. A dict names arguments by position (int) or keyword
            (str), and arguments that it does not name follow the rules. An int or "samples" alone goes for every
            argument; None alone says nothing. Entries may be nested like the argument; a dict in them, too,
            needs to name only the keys it is about.
        min_rows: No shard has fewer rows (2 for BatchNorm in training), unless the batch has.

    Raises:
        ValueError: If a tensor's size along the batch dimension is neither that of the batch nor 1, or if
            `in_dims` does not fit the arguments. The message names the argument's path, both sizes and the
            remedies.
    """
    if devices < 1:
        raise ValueError(f"a batch needs at least one device to be computed on, got {devices}")
    named = dict(kwargs)
    if in_dims is not None:
        args, named = mark_call(args, named, in_dims)
    call = (args, named)
    leaves, tree = flatten(call, is_leaf=is_marker, root=("args", "kwargs"))
    found = _find_size(leaves, dim)
    if found is None:
        size, rows, place = None, (1,), 0
    else:
        size, place = found
        rows = split_rows(size, devices, weights, min_rows)
    planner = _Planner(
        size,
        dim,
        replicas=len(rows),
        # With a single device there is nothing to split, so nothing to refuse.
        strict=devices > 1 and size is not None,
        origin=lambda: _origin(tree, leaves, place),
        first=leaves[place] if leaves else None,
    )
    if tree.is_call:
        planner.units = [planner.tensor(leaf, f"args[{index}]") for index, leaf in enumerate(leaves)]
    else:
        trees = [planner.container(args, "args"), planner.container(named, "kwargs")]
        tree = Tree(tree.kind, tree.type, tree.keys, tuple(trees))
    marked = any(isinstance(leaf, Marker) for leaf in leaves)
    return SplitPlan(size=size, dim=dim, rows=rows, tree=tree, leaves=planner.units, call=None if marked else call)


class _Planner:
    """Walks through the arguments once and decides on every part of them."""

    def __init__(
        self, size: int | None, dim: int, *, replicas: int, strict: bool, origin: Callable[[], str], first: Any
    ) -> None:
        self.size = size
        self.dim = dim
        self.replicas = replicas
        self.strict = strict
        self.origin = origin
        self.first = first
        self.units: list[Unit] = []

    def container(self, value: Any, path: str, along: int | None = None) -> Tree:
        """Opens a container whatever is in it; one in which nothing is cut stays in one piece."""
        node = unpack(value)
        if node is None:
            raise AssertionError(path)
        return node.close(
            [
                self.value(child, child_path, along)
                for child, child_path in zip(node.children, node.paths(path), strict=True)
            ]
        )

    def value(self, value: Any, path: str, along: int | None = None) -> Tree:
        """Decides on a value and everything in it."""
        if isinstance(value, Along):
            return self.value(value.value, path, value.dim)
        unit = self.unit(value, path, along)
        if unit is not None:
            self.units.append(unit)
            return LEAF
        mark = len(self.units)
        tree = self.container(value, path, along)
        if all(isinstance(unit, Whole) and not unit.tensors for unit in self.units[mark:]):
            # The driver's own object must reach replica 0: a deque that forward appends to, a dict it fills.
            self.units[mark:] = [Whole(path, unmarked(value))]
            return LEAF
        return tree

    def unit(self, value: Any, path: str, along: int | None) -> Unit | None:
        """Decides on a value that is dealt with as one; None for a container to be opened."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path, along)
        if isinstance(value, Samples):
            return self.samples(value.value, path)
        if isinstance(value, Marker):
            return Whole.of(value, path)
        if isinstance(value, PackedSequence):
            return self.packed(value, path)
        if unpack(value) is not None:
            per_sample = along is None and type(value) in {list, tuple} and self.is_per_sample(value, path)
            if not per_sample:
                return None
            unit = self.samples(value, path)
            unit.guessed = value is not self.first
            return unit
        if along is not None and value is not None:
            raise ValueError(
                f"in_dims gives dimension {along} for {path}, but that is a {type(value).__name__}; only "
                'tensors have dimensions. Use None (given whole) or "samples" (one item per row)'
            )
        return Whole(path, value)

    def tensor(self, value: torch.Tensor, path: str, along: int | None = None) -> Unit:
        """Decides on a tensor."""
        dim = self.dim if along is None else along
        if value.is_nested and self.strict:
            raise ValueError(
                f"{path} is a nested tensor, which cannot be split. Pass evenly.samples(list(x.unbind())), "
                "or the whole with evenly.replicate(...)"
            )
        if self.size is None or value.is_nested or (value.ndim == 0 and along is None):
            return TensorLeaf(path, value, None)
        if not -value.ndim <= dim < value.ndim:
            if not self.strict:
                return TensorLeaf(path, value, None)
            self.refuse(path, f"has no dimension {dim}", value)
        rows = value.shape[dim]
        if rows == self.size:
            if self.strict and value.layout is not torch.strided:
                self.check_sparse(value, dim % value.ndim, path)
            leaf = TensorLeaf(path, value, dim % value.ndim)
            leaf.guessed = along is None and value is not self.first
            return leaf
        if not self.strict or (rows == 1 and along is None):
            return TensorLeaf(path, value, None)
        return self.refuse(path, f"has size {rows} along dimension {dim}", value)

    def packed(self, value: PackedSequence, path: str) -> Unit:
        """Decides on a packed sequence."""
        size = int(value.batch_sizes[0])
        if self.strict and size != self.size:
            self.refuse(path, f"is a PackedSequence of {size} samples")
        return Packed.of(value, path)

    def samples(self, value: Sequence[Any], path: str) -> Unit:
        """Decides on a sequence that is known to have one item per row."""
        if self.strict and len(value) != self.size:
            raise ValueError(
                f"{path} has {len(value)} items, but the batch has {self.size} rows ({self.origin()}): give one "
                "item for each row, or evenly.replicate(...) around it if each replica needs all of it"
            )
        return Items.of(value, path)

    def is_per_sample(self, value: Sequence[Any], path: str) -> bool:
        """Whether a plain list or tuple has one item per row: non-tensors, or records (dicts) of tensors."""
        if len(value) != self.size or any(isinstance(item, (torch.Tensor, PackedSequence, Marker)) for item in value):
            return False
        tensors: list[torch.Tensor] = []
        for item in value:
            if type(item) in ATOMS:
                continue
            leaves, _ = flatten(item, is_leaf=is_marker, root=path)
            if any(isinstance(leaf, Marker) for leaf in leaves):
                return False
            inside = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if (inside and not is_record(item)) or any(isinstance(leaf, PackedSequence) for leaf in leaves):
                return False
            tensors += inside
        sizes = {_size_along(tensor, self.dim) or 1 for tensor in tensors}
        if self.replicas > 1 and sizes - {1} == {self.size}:
            raise ValueError(
                f"{path} has {self.size} items, as many as the batch has rows ({self.origin()}), and the "
                f"tensors in them have {self.size} rows as well: it could be one item per row or one batch "
                'per item. Say which, with evenly.samples(...) or in_dims="samples" for the first, '
                f"in_dims={self.dim} for the second"
            )
        return True

    def check_sparse(self, value: torch.Tensor, dim: int, path: str) -> None:
        """Refuses tensors whose rows cannot be cut."""
        if value.layout is not torch.sparse_coo:
            raise ValueError(
                f"{path} is a {str(value.layout).removeprefix('torch.')} tensor of shape "
                f"{list(value.shape)}, whose dimension {dim} cannot be split. Pass it as COO, or whole with "
                "evenly.replicate(...) or in_dims="
            )

    def refuse(self, path: str, what: str, value: torch.Tensor | None = None) -> NoReturn:
        """Raises the error for an argument that does not fit the batch."""
        shape = "" if value is None else f" (shape {list(value.shape)})"
        raise ValueError(
            f"{path} {what}{shape}, but the batch has {self.size} rows ({self.origin()}). If each replica "
            "needs all of it, pass evenly.replicate(...) around it or None for it in in_dims=. If its rows "
            "are elsewhere, in_dims= names their dimension; a sequence with one item per row goes into "
            "evenly.samples(...)"
        )


def _same_tensors(tensors: Sequence[torch.Tensor | None], leaves: Sequence[TensorLeaf]) -> bool:
    return all(new is leaf.value for new, leaf in zip(tensors, leaves, strict=True))


def _find_size(leaves: Sequence[Any], dim: int) -> tuple[int, int] | None:
    """The number of rows, and which leaf says so: a marked one rather than the first tensor."""
    for place, leaf in enumerate(leaves):
        size = _marked_size(leaf) if isinstance(leaf, Marker) else None
        if size is not None:
            return size, place
    for place, leaf in enumerate(leaves):
        size = _size_along(leaf, dim)
        if size is not None:
            return size, place
    return None


def _marked_size(leaf: Marker) -> int | None:
    if isinstance(leaf, Samples):
        return len(leaf.value)
    if isinstance(leaf, Along):
        inner, _ = flatten(leaf.value, is_leaf=is_marker)
        sizes = (_marked_size(x) if isinstance(x, Marker) else _size_along(x, leaf.dim) for x in inner)
        return next((size for size in sizes if size is not None), None)
    return None


def _size_along(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, torch.Tensor) and leaf.ndim and -leaf.ndim <= dim < leaf.ndim:
        return leaf.size(dim)
    return None


def _origin(tree: Tree, leaves: Sequence[Any], place: int) -> str:
    leaf, path = leaves[place], tree.paths(("args", "kwargs"))[place]
    if isinstance(leaf, Along):
        path, leaf = f"{path} along dimension {leaf.dim}", leaf.value
    if isinstance(leaf, Samples):
        return f"{path}, one for each of its {len(leaf.value)} items"
    return f"{path}, shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else path
