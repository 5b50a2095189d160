"""What rules speak of: operands without their values, calls, and plans of how replicas carry a call out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

aten = torch.ops.aten
Op: TypeAlias = "torch._ops.OpOverload[..., Any]"
Combine: TypeAlias = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor is dealt out along ``dim``; replica r holds ``rows[r]`` of it."""

    dim: int
    rows: tuple[int, ...]

    @property
    def total(self) -> int:
        """Rows of the whole."""
        return sum(self.rows)

    def shares(self) -> tuple[float, ...]:
        """The fraction of the rows that each replica holds."""
        total = self.total
        return tuple(rows / total for rows in self.rows)

    def at(self, dim: int) -> Rows:
        """The same rows along another dimension."""
        return Rows(dim, self.rows)


@dataclass(frozen=True, slots=True)
class Parts:
    """Every replica holds a part of the result.

    Attributes:
        combine: How parts become the value: a function, or its name in :data:`COMBINE`.
        weights: What each part counts in a sum; all 1 if None.
        over: Position of the result that the sum of the parts is to be divided by.
        early: Computes the value from the operands alone (by position), where all that it needs is on the driver: then
            nobody has to wait for the replicas.
    """

    combine: str | Combine = "sum"
    weights: tuple[float, ...] | None = None
    over: int | None = None
    early: Callable[[Sequence[Tensor]], Tensor] | None = None


Output: TypeAlias = Rows | Parts | None
"""What the replicas' results are together. None: there is no result (a gradient that nobody wants)."""


def _fold(function: Callable[[Tensor, Tensor], Tensor], parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = function(total, part)
    return total


COMBINE: dict[str, Combine] = {
    "sum": lambda parts: _fold(torch.add, parts),
    "prod": lambda parts: _fold(torch.mul, parts),
    "amax": lambda parts: torch.stack(parts).amax(0),
    "amin": lambda parts: torch.stack(parts).amin(0),
    "all": lambda parts: torch.stack(parts).all(0),
    "any": lambda parts: torch.stack(parts).any(0),
    "logsumexp": lambda parts: torch.stack(parts).logsumexp(0),
}
"""Ways to make one value of the replicas' parts, in the order of the replicas."""


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor among the arguments: all that a plan may depend on.

    Attributes:
        position: Its place among the tensors.
        rows: How it is dealt out; None for a plain tensor, which every replica is given whole.
    """

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rows: Rows | None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


# What may stand in a plan in the place of an operand.


@dataclass(frozen=True, slots=True)
class Cut:
    """A plain operand that is dealt out, along ``dim``, as the sharded ones are."""

    operand: Operand
    dim: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divided:
    """A plain operand divided by a number, or by another plain operand."""

    operand: Operand
    by: int | Operand


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The size of each replica's own piece of an operand."""

    operand: Operand | Cut
    dim: int


@dataclass(slots=True)
class Plan:
    """What each replica runs, and what the results are together.

    In ``args`` and ``kwargs`` a sharded operand stands for each replica's own rows, a plain one for itself, given
    whole to each; :class:`Cut`, :class:`Divided` and :class:`SizeOf` for what they say.

    Attributes:
        view: The results share memory with the first argument.
        copies: They should, but are copies: whoever writes to one of them has to gather first.
        in_place: The first argument is written, and is the result.
    """

    function: Op
    args: tuple[Any, ...]
    outputs: tuple[Output, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    view: bool = False
    copies: bool = False
    in_place: bool = False


class Call:
    """An operation on arguments of which at least one is sharded; arguments are known by their names in its schema.

    Args:
        function: The operation.
        args, kwargs: Its arguments, with an :class:`Operand` for each tensor.

    Attributes:
        operands: All tensors among the arguments, in order.
        lead: How the first sharded one is dealt out.
    """

    def __init__(self, function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.schema = function._schema
        self._given = len(args)
        self._keywords = tuple(kwargs)
        self._values: dict[str, Any] = {}
        for position, argument in enumerate(self.schema.arguments):
            name = argument.name
            self._values[name] = args[position] if position < len(args) else kwargs.get(name, argument.default_value)
        self.operands: list[Operand] = list(operands_of((args, *kwargs.values())))
        self.lead: Rows = next(operand.rows for operand in self.operands if operand.rows is not None)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def get(self, name: str) -> Any:
        """An argument, or None if the operation has none of that name."""
        return self._values.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def first(self) -> Any:
        """The first argument."""
        return next(iter(self._values.values()))

    @property
    def returns(self) -> int:
        """Number of results."""
        return len(self.schema.returns)

    @property
    def in_place(self) -> bool:
        """Whether the first argument is written, and is the result."""
        alias = self.schema.arguments[0].alias_info if self.schema.arguments else None
        return alias is not None and alias.is_write

    def dims(self, name: str, ndim: int) -> list[int] | None:
        """Dimensions given as an argument, counted from the front.

        None where they make no sense: the operation itself will say so.
        """
        value = self[name]
        found: list[int] = [value] if isinstance(value, int) else list(value)
        found = [dim + ndim if dim < 0 else dim for dim in found]
        return found if all(0 <= dim < ndim for dim in found) else None

    def plan(
        self,
        *outputs: Output,
        cuts: Mapping[Operand, Any] | None = None,
        function: Op | None = None,
        view: bool = False,
        **changes: Any,
    ) -> Plan | None:
        """The plan to run this operation on each replica's own rows.

        Args:
            outputs: What the results are together.
            cuts: What stands in the place of operands.
            function: Another operation with the same arguments.
            view: Whether results share memory with the first argument.
            changes: Arguments to change, by name.
        """
        if self.in_place and (not isinstance(self.first, Operand) or self.first.rows != outputs[0]):
            return None  # a plain tensor is written, or one that would be dealt out in another way afterwards
        if self.schema.is_mutable and not self.in_place:
            return None
        if any("Tensor" not in str(result.type) for result in self.schema.returns):
            return None  # a number cannot wait
        places = cuts or {}
        final = {name: _placed(changes.get(name, value), places) for name, value in self._values.items()}
        names = list(final)
        args = tuple(final[name] for name in names[: self._given])
        keywords = dict.fromkeys((*self._keywords, *(name for name in changes if name in names[self._given :])))
        kwargs = {name: final[name] for name in keywords}
        return Plan(function or self.function, args, outputs, kwargs, view=view, in_place=self.in_place)


Rule: TypeAlias = Callable[[Call], "Plan | None"]


def operands_of(value: Any) -> Iterable[Operand]:
    """All operands inside of arguments, in order."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from operands_of(item)


def _placed(value: Any, places: Mapping[Operand, Any]) -> Any:
    if isinstance(value, Operand):
        return places.get(value, value)
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return type(items)(_placed(item, places) for item in items)
    return value
