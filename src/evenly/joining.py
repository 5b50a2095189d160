"""The outputs of all replicas as one: what of each replica's output goes where, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenly.aliases import Aliases, Given
from evenly.containers import StandIn
from evenly.outputs import (
    Constant,
    Mean,
    OutputRule,
    PackedRows,
    Rows,
    SampleList,
    Stack,
    Sum,
    Unknown,
    check_and_join_values,
    check_tensor_metas,
)  # fmt: skip
from evenly.packed import Layout, join_samples, layout_of
from evenly.sharded import Parts, ShardedTensor
from evenly.structure import Tree, flatten
from evenly.team import values
from evenly.team.answer import Answer, RemotePacked, RemoteTensor, tensors_of
from evenly.team.template import Slot, Template
from evenly.team.values import Handle

if TYPE_CHECKING:
    from evenly.team.team import Team


@dataclass(eq=False)
class Joint:
    """One tensor of the joined output, made of one tensor of every replica's.

    Attributes:
        tensor: What the user gets, still without autograd; None once it has been taken.
        rule: How it is made of the parts.
        positions: Where the part is among the tensors of each replica's output; None where it has none.
        differentiable: Whether gradients can flow back through it.
        shares: The fraction of the rows that each replica has.
        path: Where it is in the output.
    """

    tensor: Tensor | None
    rule: OutputRule
    positions: tuple[int | None, ...]
    differentiable: bool
    shares: tuple[float, ...]
    path: str
    dealt: tuple[Team, int, tuple[int, ...]] | None = field(init=False)
    """Whose replicas hold the rows, along which dimension, how many each; None for a tensor without rows."""

    def __post_init__(self) -> None:
        shards = self.tensor.shards if isinstance(self.tensor, ShardedTensor) else None
        self.dealt = shards and (shards.team, shards.dim, shards.rows)

    def spread(self, gradient: Tensor) -> list[Tensor | Handle | None]:
        """What flows into each replica's part: a tensor from here, or the replica's own rows of a sharded one."""
        dealt = self.dealt
        if isinstance(gradient, ShardedTensor):
            shards = gradient.shards
            if shards and dealt == (shards.team, shards.dim, shards.rows) and not isinstance(self.rule, Stack):
                return [shards.local, *[shards.handle] * (len(shards.rows) - 1)]
            gradient = gradient.plain()
        if isinstance(self.rule, Stack):
            return list(gradient.unbind(0))
        if dealt is not None:
            return list(torch.split(gradient, list(dealt[2]), dealt[1]))
        if isinstance(self.rule, Unknown) and Sum() in self.rule.candidates:
            message = (
                f"{self.path} cannot be differentiated, because {self.rule.reason}, and the gradients of these differ. "
                'Say which with scalar_outputs= ("mean" or "sum")'
            )
            raise ValueError(message)
        if isinstance(self.rule, (Mean, Unknown)):
            return [gradient * share for share in self.shares]
        if isinstance(self.rule, Sum):
            return [gradient] * len(self.shares)
        return [None if position is None else gradient for position in self.positions]

    def collect(self, parts: Sequence[Tensor | None], handle: Handle | None) -> Tensor | None:
        """The reverse of :meth:`spread`, for gradients of gradients; see :class:`evenly.reverse.End`."""
        dealt = self.dealt
        if handle is not None:
            own = cast("Tensor", parts[0])
            if dealt is not None and not isinstance(self.rule, Stack):
                return ShardedTensor.of_rows(dealt[0], own, handle, dealt[1], dealt[2])
            (others,) = zip(*values.fetch(handle.team, [handle], len(self.shares)), strict=True)
            parts = [own, *others]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        if dealt is not None:
            filled = [
                (present[0].new_zeros(self._part_shape(present[0], rows)) if part is None else part)
                for part, rows in zip(parts, dealt[2], strict=True)
            ]
            return torch.stack(filled) if isinstance(self.rule, Stack) else torch.cat(filled, dealt[1])
        weights = self.shares if isinstance(self.rule, (Mean, Unknown)) else (1.0,) * len(parts)
        weighted = [part * weight for part, weight in zip(parts, weights, strict=True) if part is not None]
        return sum(weighted[1:], weighted[0])

    def _part_shape(self, like: Tensor, rows: int) -> list[int]:
        shape = list(like.shape)
        if self.dealt is not None and not isinstance(self.rule, Stack):
            shape[self.dealt[1]] = rows
        return shape


class Joiner:
    """Joins the outputs of one call.

    Args:
        team: Whose replicas computed.
        rows: Rows of each replica.
        tree: The structure of an output, where a list that follows the rows is one leaf.
        found: The rule of each of its leaves.
        own: Tensors that are the user's own, by id, and stay so when they are returned.
        packed: The layout of a packed input, whose order of samples packed outputs keep.
        given: The driver's own arguments, each with the tensor of the user's that it is, or has rows of.
    """

    def __init__(
        self,
        team: Team,
        rows: tuple[int, ...],
        tree: Tree,
        found: Sequence[OutputRule],
        own: Collection[int] = (),
        packed: Layout | None = None,
        given: Given = (),
    ) -> None:
        self.team = team
        self.rows = rows
        self.tree = tree
        self.rules = found
        self.joints: list[Joint] = []
        self._own = own
        self._packed_input = packed
        self._made: dict[int, Any] = {}
        self._aliases = Aliases(given, sum(rows))
        total = sum(rows)
        self._shares = tuple(count / total for count in rows)

    def join(self, local: Any, answers: Sequence[Answer], base: int) -> Join:
        """Put the driver's output and those of the replicas together.

        Raises:
            ValueError: They do not fit together; the message names the path in the output.
        """
        own, tree = self.tree.fit(local, "output")
        outputs = [own]
        outputs += [self.tree.flatten_up_to(answer.output, "output") for answer in answers]
        self._positions = {id(tensor): position for position, tensor in enumerate(tensors_of(local))}
        leaves: list[Any] = []
        for path, rule, parts in zip(self.tree.paths("output"), self.rules, zip(*outputs, strict=True), strict=True):
            leaves.append(self._leaf(path, rule, list(parts), base))
        return Join(tree, leaves, self.joints)

    def _leaf(self, path: str, rule: OutputRule, parts: list[Any], base: int) -> Any:
        first = parts[0]
        if isinstance(first, PackedSequence):
            return self._once(first, self._packed, path, rule, parts, base)
        if isinstance(first, Tensor) and all(isinstance(part, RemoteTensor) for part in parts[1:]):
            return self._once(first, self._tensor, path, rule, parts, base)
        if isinstance(rule, SampleList):
            parts = [self._pieces(part, replica, base) for replica, part in enumerate(parts)]
        return check_and_join_values(path, rule, parts, self.rows)

    def _once(
        self, first: Any, make: Callable[..., Any], path: str, rule: OutputRule, parts: list[Any], base: int
    ) -> Any:
        """What is returned in several places is one object in all of them, also for who writes to it."""
        known = self._made.get(id(first))
        if known is None or known[0] != rule:
            known = self._made[id(first)] = (rule, make(path, rule, parts, base))
        return known[1]

    def _tensor(self, path: str, rule: OutputRule, parts: list[Any], base: int) -> Tensor | _Later:
        local = cast("Tensor", parts[0])
        remote = cast("list[RemoteTensor]", parts[1:])
        metas = [(local.shape, local.dtype), *((part.shape, part.dtype) for part in remote)]
        own = id(local) in self._own
        rule = Constant() if own else rule  # whatever its shape looks like
        check_tensor_metas(path, rule, metas, self.rows)
        positions = (self._positions[id(local)], *(part.position for part in remote))
        handle = self._handle(base, [part.position for part in remote])
        value, team = local.detach(), self.team
        if own:
            self._check_constant(path, rule, value, handle)
            return local
        if isinstance(rule, Rows):
            user = self._aliases.of_user(local, rule)
            if user is not None:
                return user
            rows = tuple(count * rule.factor for count in self.rows)
            if self._aliases.is_of_user(local):
                value = value.clone()  # as it is in the other replicas: apart from the user's tensor
            sharded = ShardedTensor.of_rows(team, value, handle, rule.dim, rows)
            self._aliases.note(path, local, sharded)
            tensor: Tensor = sharded
        elif isinstance(rule, (Mean, Sum)):
            weights = self._shares if isinstance(rule, Mean) else None
            tensor = ShardedTensor.of_parts(Parts(team, value, handle, len(self.rows), "sum", weights))
        elif isinstance(rule, Stack):
            template = Template(torch.ops.aten.unsqueeze.default, (Slot(0), 0), {})
            number = values.define(team, ("stack",), template)
            (stacked,) = values.run(team, len(self.rows), number, [handle], 1)
            tensor = ShardedTensor.of_rows(team, value.unsqueeze(0), stacked, 0, (1,) * len(self.rows))
        else:
            self._check_constant(path, rule, value, handle)
            tensor = value
            # What may be a mean as well (it was the same for all rows so far) must have the gradient of one.
            if not isinstance(rule, Unknown):
                positions = (positions[0], *[None] * len(remote))
        return self._add(Joint(tensor, rule, positions, local.requires_grad, self._shares, path))

    def _add(self, joint: Joint) -> _Later:
        self.joints.append(joint)
        return _Later(len(self.joints) - 1)

    def _handle(self, base: int, positions: list[int]) -> Handle:
        """A handle of one tensor in all replicas; where they counted differently they are told of a common number."""
        if len(set(positions)) == 1:
            return Handle(self.team, base + positions[0])
        number = self.team.reserve(1)
        for replica, position in enumerate(positions, 1):
            values.rename(self.team, replica, base + position, number)
        return Handle(self.team, number)

    def _check_constant(self, path: str, rule: OutputRule, local: Tensor, handle: Handle) -> None:
        """Without rows a value must be the same everywhere."""
        remote = values.fetch(self.team, [handle], len(self.rows))
        unknown = isinstance(rule, Unknown)
        for replica, (found,) in enumerate(remote, 1):
            if not agree(local, found) or (unknown and bool((local.ne(0) & local.isfinite()).any())):
                reason = f", because {rule.reason}" if isinstance(rule, Unknown) else ""
                message = (
                    f"{path} has no rows, and is {_short(local)} on replica 0 but {_short(found)} on replica "
                    f"{replica}: it cannot be joined{reason}. Say how it depends on the batch with out_dims= or "
                    'scalar_outputs= ("mean", "sum", "stack"); a loss that is neither the mean nor the sum over rows '
                    "needs reduction='none' in forward, and its reduction outside"
                )
                raise ValueError(message)

    def _packed(self, path: str, rule: OutputRule, parts: list[Any], base: int) -> _PackedLater:
        local = cast("PackedSequence", parts[0])
        remote = cast("list[RemotePacked]", parts[1:])
        sizes = [(local.data.shape, local.data.dtype), *((p.data.shape, p.data.dtype) for p in remote)]
        check_tensor_metas(path, PackedRows(), sizes, self.rows)
        layouts = [layout_of(local), *(part.layout for part in remote)]
        index, layout = join_samples(layouts, self._packed_input)
        handle = self._handle(base, [part.data.position for part in remote])
        steps = tuple(int(part.batch_sizes.sum()) for part in layouts)
        tensor = ShardedTensor.of_rows(self.team, local.data.detach(), handle, 0, steps)
        positions = (self._positions[id(local.data)], *(part.data.position for part in remote))
        later = self._add(Joint(tensor, rule, positions, local.data.requires_grad, self._shares, path))
        return _PackedLater(later.position, index, layout)

    def _pieces(self, items: Any, replica: int, base: int) -> Any:
        """Tensors inside of per-sample items: each belongs to one replica, and is brought here."""
        leaves, tree = flatten(items, root="output", objects=True)
        made: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, RemoteTensor):
                handle = Handle(self.team, base + leaf.position)
                tensor = values.fetch_from(self.team, replica, handle)
                position, differentiable = leaf.position, leaf.requires_grad
            elif isinstance(leaf, Tensor):
                self._aliases.note("an item of a list", leaf, None)
                tensor, position, differentiable = leaf.detach(), self._positions[id(leaf)], leaf.requires_grad
            else:
                made.append(leaf)
                continue
            positions = tuple(position if number == replica else None for number in range(len(self.rows)))
            made.append(self._add(Joint(tensor, Constant(), positions, differentiable, self._shares, "output")))
        return tree.rebuild(made)


@dataclass
class _Later(StandIn):
    """Stands for a joint until autograd has put its tensor in the graph."""

    position: int


@dataclass
class _PackedLater:
    position: int
    index: Tensor
    layout: Any


@dataclass(eq=False)
class Join:
    """A joined output whose tensors autograd has yet to see."""

    tree: Tree
    leaves: list[Any]
    joints: list[Joint]

    def take(self) -> tuple[Tensor, ...]:
        """The tensors of all joints, once. Afterwards autograd's graph may refer to this join without a cycle."""
        taken = tuple([cast("Tensor", joint.tensor) for joint in self.joints])
        for joint in self.joints:
            joint.tensor = None
        return taken

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The output around ``tensors``, one per joint."""
        packed = {
            id(leaf): leaf.layout.pack(tensors[leaf.position].index_select(0, leaf.index))
            for leaf in self.leaves
            if isinstance(leaf, _PackedLater)
        }
        return self.tree.rebuild(
            [packed[id(leaf)] if id(leaf) in packed else _fill(leaf, tensors) for leaf in self.leaves]
        )


def _fill(leaf: Any, tensors: Sequence[Tensor]) -> Any:
    # Not a closure: one that calls itself is a reference cycle, which would keep the tensors.
    if isinstance(leaf, _Later):
        return tensors[leaf.position]
    if isinstance(leaf, (list, tuple)) or hasattr(leaf, "maxlen"):
        inner, tree = flatten(leaf, root="output", objects=True)
        return tree.rebuild([_fill(item, tensors) if isinstance(item, _Later) else item for item in inner])
    return leaf


def agree(a: Tensor, b: Tensor) -> bool:
    """Whether two replicas' values are the same, but for rounding."""
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and torch.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True)


def _short(tensor: Tensor) -> str:
    return str(tensor.item()) if tensor.numel() == 1 else f"a tensor of shape {list(tensor.shape)} with other values"
