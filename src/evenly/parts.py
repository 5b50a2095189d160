"""The parts of a call's arguments, each knowing how it is cut for some rows of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from evenly.marks import Marker, is_marker, unmarked
from evenly.packed import Layout, layout_of, select_samples
from evenly.structure import Tree, flatten

_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
Treatment = Literal["split", "whole", "samples", "object"]


@dataclass(eq=False, slots=True)
class Part:
    """Some rows of a batch: those from `start` to `stop`, or those listed in `chosen`.

    Attributes:
        start: First row.
        stop: Row after the last.
        replica: Whose shard it is, None for a selection of rows.
        rows: The rows of all replicas.
        chosen: The rows of a selection.
    """

    start: int
    stop: int
    replica: int | None = None
    rows: tuple[int, ...] = ()
    chosen: tuple[int, ...] | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[int]) -> Part:
        """Any rows, in any order; neighbours are taken as a view."""
        chosen = tuple(rows)
        if chosen and chosen == tuple(range(chosen[0], chosen[0] + len(chosen))):
            return cls(chosen[0], chosen[0] + len(chosen))
        return cls(0, len(chosen), chosen=chosen)

    @property
    def numbers(self) -> Sequence[int]:
        """The rows one by one."""
        return range(self.start, self.stop) if self.chosen is None else self.chosen


class Unit:
    """One part of the arguments that is dealt with as one.

    Attributes:
        path: The path of the argument, as in `args[0]["img"]`.
        value: What the user gave.
        treatment: How it is given to the replicas.
        guessed: Whether it is cut only because it has as many rows as the batch.
    """

    path: str
    value: Any
    treatment: Treatment
    guessed = False

    @property
    def tensors(self) -> Sequence[TensorLeaf]:
        """The tensors in it."""
        return ()

    def build(self, part: Part, tensors: Sequence[torch.Tensor | None]) -> Any:
        """What stands in its place for these rows, around the given tensors."""
        raise NotImplementedError


@dataclass(eq=False)
class TensorLeaf(Unit):
    """A tensor of the arguments.

    Attributes:
        dim: The dimension that is cut, not negative; None for a tensor that is given whole, or as part of an
            item.
        item: The row to whose item it belongs, when it is part of a per-sample list.
        copied: Whether it is a copy of what the user gave.
    """

    path: str
    value: torch.Tensor
    dim: int | None
    item: int | None = None
    copied: bool = field(default=False, kw_only=True)

    @property
    def treatment(self) -> Treatment:  # type: ignore[override]
        """Cut, or given whole."""
        return "whole" if self.dim is None and self.item is None else "split"

    @property
    def tensors(self) -> Sequence[TensorLeaf]:
        """The leaf itself."""
        return (self,)

    def build(self, part: Part, tensors: Sequence[torch.Tensor | None]) -> Any:
        """The given tensor."""
        del part
        return tensors[0]

    def cut(self, part: Part) -> torch.Tensor | None:
        """The rows of a part; see `SplitPlan.cut`."""
        value, dim = self.value, self.dim
        if dim is None:
            return value if self.item is None or self.item in part.numbers else None
        if part.chosen is not None:
            return value.index_select(dim, torch.tensor(part.chosen, dtype=torch.int64, device=value.device))
        if part.replica is not None and type(value) is not torch.Tensor and hasattr(value, "evenly_shards"):
            return cast("Any", value).evenly_cut(part.replica, part.rows, dim)
        if part.stop - part.start == value.shape[dim]:
            return value
        if value.layout is not torch.strided:
            rows = torch.arange(part.start, part.stop, device=value.device)
            return value.index_select(dim, rows)
        return value.narrow(dim, part.start, part.stop - part.start)

    def merge(self, pieces: Sequence[torch.Tensor | None], parts: Sequence[Part]) -> torch.Tensor | None:
        """The inverse of `cut`; see `SplitPlan.merge`."""
        present = [piece for piece in pieces if piece is not None]
        if not present:
            return None
        if self.dim is None:
            total = present[0]
            for piece in present[1:]:
                total = total + piece
            return total
        if len(pieces) == 1:
            return present[0]
        filled: list[torch.Tensor] = []
        for piece, part in zip(pieces, parts, strict=True):
            shape = list(self.value.shape)
            shape[self.dim] = part.stop - part.start
            filled.append(present[0].new_zeros(shape) if piece is None else piece)
        return torch.cat(filled, self.dim)


def cut(leaf: TensorLeaf, part: Part) -> torch.Tensor | None:
    """The rows of a part; see `SplitPlan.cut`."""
    return leaf.cut(part)


@dataclass(eq=False)
class PackedData(TensorLeaf):
    """The steps of a packed sequence, cut by samples."""

    layout: Layout = field(kw_only=True)
    known: dict[Sequence[int], tuple[torch.Tensor, Layout]] = field(default_factory=dict[Any, Any])

    def select(self, part: Part) -> tuple[torch.Tensor, Layout]:
        """The index of a part's steps and their layout."""
        if part.numbers not in self.known:
            self.known[part.numbers] = select_samples(self.layout, part.numbers)
        return self.known[part.numbers]

    def cut(self, part: Part) -> torch.Tensor | None:
        """The steps of a part's samples."""
        index, _ = self.select(part)
        return self.value.index_select(0, index.to(self.value.device))

    def merge(self, pieces: Sequence[torch.Tensor | None], parts: Sequence[Part]) -> torch.Tensor | None:
        """The steps of all samples where they were."""
        present = [piece for piece in pieces if piece is not None]
        if not present:
            return None
        whole = present[0].new_zeros(self.value.shape)
        for piece, part in zip(pieces, parts, strict=True):
            if piece is not None:
                index, _ = self.select(part)
                whole = whole.index_copy(0, index.to(whole.device), piece)
        return whole


@dataclass(eq=False)
class Packed(Unit):
    """A packed sequence."""

    path: str
    value: PackedSequence
    data: PackedData
    treatment: ClassVar[Treatment] = "split"  # type: ignore[misc]

    @classmethod
    def of(cls, value: PackedSequence, path: str) -> Packed:
        """A packed sequence at a path."""
        return cls(path, value, PackedData(f"{path}.data", value.data, 0, layout=layout_of(value)))

    @property
    def tensors(self) -> Sequence[TensorLeaf]:
        """Its steps."""
        return (self.data,)

    def build(self, part: Part, tensors: Sequence[torch.Tensor | None]) -> Any:
        """A packed sequence of the part's samples."""
        _, layout = self.data.select(part)
        return layout.pack(cast("torch.Tensor", tensors[0]))


@dataclass(eq=False)
class Whole(Unit):
    """A value that each replica gets whole; the driver's own object goes to replica 0."""

    path: str
    value: Any
    tree: Tree | None = None
    inside: Sequence[TensorLeaf] = ()

    @property
    def treatment(self) -> Treatment:  # type: ignore[override]
        """A value to be copied, or one around tensors."""
        return "whole" if self.inside else "object"

    @classmethod
    def of(cls, marker: Marker, path: str) -> Unit:
        """What `replicate` was put around."""
        value = marker.value
        while isinstance(value, Marker):  # the outermost counts
            value = value.value
        if isinstance(value, torch.Tensor):
            return TensorLeaf(path, value, None)
        opened = _Opened.of(value, path, None)
        return cls(path, opened.value, opened.tree, opened.tensors) if opened.tensors else cls(path, opened.value)

    @property
    def tensors(self) -> Sequence[TensorLeaf]:
        """The tensors that `replicate` was put around."""
        return self.inside

    def build(self, part: Part, tensors: Sequence[torch.Tensor | None]) -> Any:
        """The same object, as long as its tensors are the same."""
        del part
        if self.tree is None or all(new is leaf.value for new, leaf in zip(tensors, self.inside, strict=True)):
            return self.value
        return _Opened.of(self.value, self.path, None).fill(tensors)


@dataclass(eq=False)
class Items(Unit):
    """A sequence with one item per row; its tensors belong to their items."""

    path: str
    value: Sequence[Any]
    opened: Sequence[_Opened] | None
    treatment: ClassVar[Treatment] = "samples"  # type: ignore[misc]

    @classmethod
    def of(cls, value: Sequence[Any], path: str) -> Items:
        """A sequence at a path."""
        if all(type(item) in _PLAIN for item in value):
            return cls(path, value, None)
        opened = [_Opened.of(item, f"{path}[{row}]", row) for row, item in enumerate(value)]
        as_given = all(not item.tensors and item.value is given for item, given in zip(opened, value, strict=True))
        return cls(path, value, None if as_given else opened)

    @cached_property
    def tensors(self) -> Sequence[TensorLeaf]:  # type: ignore[override]
        """The tensors in all items."""
        return [leaf for item in self.opened or () for leaf in item.tensors]

    def build(self, part: Part, tensors: Sequence[torch.Tensor | None]) -> Any:
        """The items of the part's rows."""
        if self.opened is None:
            chosen = [self.value[row] for row in part.numbers]
        else:
            given = iter(tensors)
            theirs = [[next(given) for _ in item.tensors] for item in self.opened]
            chosen = [self.opened[row].fill(theirs[row]) for row in part.numbers]
        return tuple(chosen) if type(self.value) is tuple else chosen


@dataclass(frozen=True, eq=False)
class _Opened:
    """A nested value whose tensors can be replaced."""

    value: Any
    tree: Tree
    leaves: Sequence[Any]
    tensors: Sequence[TensorLeaf]

    @classmethod
    def of(cls, value: Any, path: str, item: int | None) -> _Opened:
        leaves, tree = flatten(value, is_leaf=is_marker, root=path)
        if any(isinstance(leaf, Marker) for leaf in leaves):
            value = unmarked(value)
            leaves, tree = flatten(value, root=path)
        tensors: list[TensorLeaf] = []
        for name, leaf in zip(tree.paths(path), leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                tensors.append(TensorLeaf(name, leaf, None, item))
            elif isinstance(leaf, PackedSequence):
                tensors.append(TensorLeaf(f"{name}.data", leaf.data, None, item))
        return cls(value, tree, leaves, tensors)

    def fill(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        if all(new is leaf.value for new, leaf in zip(tensors, self.tensors, strict=True)):
            return self.value
        given = iter(tensors)
        return self.tree.rebuild([_refilled(leaf, given) for leaf in self.leaves])


def _refilled(leaf: Any, given: Iterator[torch.Tensor | None]) -> Any:
    if isinstance(leaf, PackedSequence):
        return layout_of(leaf).pack(cast("torch.Tensor", next(given)))
    return next(given) if isinstance(leaf, torch.Tensor) else leaf
