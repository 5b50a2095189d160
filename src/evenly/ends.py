"""What the graphs of all replicas lead to together, and how gradients are dealt out from there and collected again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from evenly.sharded import ShardedTensor, plain
from evenly.team.values import Handle

if TYPE_CHECKING:
    from evenly.batch import SplitPlan, TensorLeaf
    from evenly.team.team import Team


class End(Protocol):
    """One tensor that gradients come back to: an output of the model, or a gradient of it.

    Attributes:
        positions: Where each replica has its part of it, among the outputs of its graph; None where it has none.
    """

    @property
    def positions(self) -> tuple[int | None, ...]:
        """See the class."""
        ...

    def spread(self, gradient: Tensor) -> Sequence[Tensor | Handle | None]:
        """What flows into each replica's part."""
        ...

    def collect(self, parts: Sequence[Tensor | None], handle: Handle | None) -> Tensor | None:
        """The reverse of :meth:`spread`: the gradient of the gradient, from those of what flowed into the parts.

        Args:
            parts: One per replica; with a ``handle`` only the driver's.
            handle: The other replicas' parts where they are, when all have one.
        """
        ...


@dataclass(frozen=True)
class OfParameter:
    """The gradient of a parameter, which is the sum of all replicas'."""

    positions: tuple[int | None, ...]

    def spread(self, gradient: Tensor) -> Sequence[Tensor | Handle | None]:
        """All of it for each."""
        return [plain(gradient)] * len(self.positions)

    def collect(self, parts: Sequence[Tensor | None], handle: Handle | None) -> Tensor | None:
        """Not needed: nobody goes beyond second order."""
        raise NotImplementedError


@dataclass(frozen=True)
class OfInput:
    """The gradient of an input, which lies where its rows are."""

    positions: tuple[int | None, ...]
    team: Team
    plan: SplitPlan
    leaf: TensorLeaf

    def spread(self, gradient: Tensor) -> Sequence[Tensor | Handle | None]:
        """To each what belongs to its rows."""
        leaf = replace(self.leaf, value=gradient)
        handle = resident(self.team, self.plan, leaf)
        own = self.plan.cut(leaf, 0)
        others = range(1, len(self.positions))
        return [own, *(handle if handle is not None else self.plan.cut(leaf, replica) for replica in others)]

    def collect(self, parts: Sequence[Tensor | None], handle: Handle | None) -> Tensor | None:
        """Not needed: nobody goes beyond second order."""
        raise NotImplementedError


def resident(team: Team, plan: SplitPlan, leaf: TensorLeaf) -> Handle | None:
    """The handle of an input whose rows are in the replicas already, as they are to be split."""
    value = leaf.value
    if not isinstance(value, ShardedTensor) or leaf.dim is None or leaf.item is not None:
        return None
    shards = value.shards
    fits = shards is not None and shards.team is team and shards.dim == leaf.dim
    return shards.handle if shards is not None and fits and shards.rows == plan.rows else None


def bring(team: Team, plan: SplitPlan) -> None:
    """Bring arguments here that lie with other replicas than the team's.

    Before the team is locked: two threads that asked for each other's while they hold their own would wait for ever.
    """
    for leaf in plan.tensor_leaves():
        value = leaf.value
        if isinstance(value, ShardedTensor) and lies_elsewhere(team, value):
            leaf.value, leaf.copied = value.full_tensor(), True


def lies_elsewhere(team: Team, tensor: Tensor) -> bool:
    """Whether other replicas than the team's, or whoever knows, must be asked for a tensor's values."""
    if not isinstance(tensor, ShardedTensor) or tensor.is_plain:
        return False
    return tensor.shards is None or tensor.shards.team is not team
