"""What a sharded tensor is made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from evenly.rules import COMBINE
from evenly.rules.plan import Combine, Op
from evenly.sharded import conjugation
from evenly.team import values

if TYPE_CHECKING:
    from evenly.sharded.tensor import ShardedTensor
    from evenly.team.team import Team
    from evenly.team.values import Handle


@dataclass(slots=True)
class Shards:
    """Rows of a tensor, dealt out along one dimension.

    Attributes:
        team: Whose replicas hold them.
        local: The driver's rows.
        handle: The other replicas' rows.
        dim: The dimension that is dealt out.
        rows: Its size in each replica that takes part.
    """

    team: Team
    local: Tensor
    handle: Handle
    dim: int
    rows: tuple[int, ...]

    def gather(self, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """The whole tensor, here."""
        whole = torch.empty_strided(shape, stride, dtype=self.local.dtype, device=self.local.device)
        pieces = torch.split(whole, list(self.rows), self.dim)
        with conjugation.respected():
            pieces[0].copy_(self.local)
        with self.team.lock:
            values.fetch(self.team, [self.handle], len(self.rows), [[piece] for piece in pieces[1:]])
        return whole


@dataclass(slots=True)
class Parts:
    """A value of which every replica holds a part: their sum (or another combination) is the value.

    Attributes:
        local: The driver's part.
        combine: How parts become the value: a function, or its name in :data:`evenly.rules.COMBINE`.
        weights: What each part counts in a sum.
        over: A second value of the same kind which the sum of the parts is divided by.
    """

    team: Team
    local: Tensor
    handle: Handle
    replicas: int
    combine: str | Combine = "sum"
    weights: tuple[float, ...] | None = None
    over: Parts | None = None
    _found: Tensor | None = field(default=None, repr=False)

    def value(self) -> Tensor:
        """Add up, in the order of the replicas, in at least single precision. Done once."""
        if self._found is None:
            wanted = [self] if self.over is None or self.over._found is not None else [self, self.over]
            with self.team.lock:
                remote = values.fetch(self.team, [parts.handle for parts in wanted], self.replicas)
            totals = [parts._total([found[i] for found in remote]) for i, parts in enumerate(wanted)]
            if self.over is not None:
                if len(totals) > 1:
                    self.over._found = totals[1].to(self.over.local.dtype)
                totals[0] = totals[0] / (totals[1] if len(totals) > 1 else self.over.value())
            self._found = totals[0].to(self.local.dtype)
        return self._found

    def settle(self, value: Tensor) -> None:
        """Take a value that was found in another way than by adding up."""
        self._found = value

    def _total(self, remote: list[Tensor]) -> Tensor:
        parts = [self.local, *remote]
        if self.local.dtype in (torch.float16, torch.bfloat16):
            parts = [part.float() for part in parts]
        if self.weights is not None:
            parts = [part * weight for part, weight in zip(parts, self.weights, strict=True)]
        combine = COMBINE[self.combine] if isinstance(self.combine, str) else self.combine
        return combine(parts)


@dataclass(slots=True)
class Pending:
    """A number that is computed from such values when somebody looks: the replicas are waited for once, at the end.

    Attributes:
        function: The operation.
        args, kwargs: Its arguments; parts among them stand for their value.
        local: A number of the dtype of the result.
        depth: How many of them hang together.
    """

    function: Op
    args: tuple[object, ...]
    kwargs: dict[str, object]
    local: Tensor
    depth: int
    _found: Tensor | None = field(default=None, repr=False)

    def value(self) -> Tensor:
        """Compute it. Done once."""
        found = self._found
        if found is None:
            args = [arg.value() if isinstance(arg, (Parts, Pending)) else arg for arg in self.args]
            found = self._found = cast("Tensor", self.function(*args, **self.kwargs))
            self.args = ()
        return found


@dataclass(slots=True)
class Window:
    """A piece of a sharded tensor that cuts through its rows: a copy here, as long as nobody writes to either.

    Attributes:
        values: The copy.
        writes: How often the family had been written to when it was made.
    """

    values: Tensor
    writes: int


class Family:
    """Sharded tensors that share memory: one and the views of it, in the order in which they were made.

    Attributes:
        writes: How often one of them has been written to.
        copies: Some of them are copies where they should be views: a write has to gather all.
        other: What shares their memory, and would miss a write: it is not known how it is made of them.
    """

    __slots__ = ("_members", "copies", "other", "writes")

    def __init__(self, first: ShardedTensor) -> None:
        self._members: list[weakref.ref[ShardedTensor]] = [weakref.ref(first)]
        self.writes = 0
        self.copies = False
        self.other: str | None = None

    def add(self, member: ShardedTensor) -> None:
        """Take in a new member."""
        if len(self._members) > 32:  # noqa: PLR2004 - now and then, forget those that are gone
            self._members = [ref for ref in self._members if ref() is not None]
        self._members.append(weakref.ref(member))

    def living(self) -> list[ShardedTensor]:
        """The members that still exist."""
        return [member for ref in self._members if (member := ref()) is not None]


Again = Callable[[Tensor], Tensor]
"""How to make a view again, from what it is a view of."""
