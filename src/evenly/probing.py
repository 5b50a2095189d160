"""How a model's outputs depend on the batch: asked of one replica once, then remembered."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenly.aliases import Given
from evenly.batchwide import SumsPerRowError
from evenly.divisors import Divisors, Suspect, suspects
from evenly.joining import Join, Joiner, agree
from evenly.outputs import Constant, Mean, OutputRule, PackedRows, Rows, SampleList, Sum, Unknown, override_rules
from evenly.packed import layout_of
from evenly.parts import Packed
from evenly.probe import NOT_FINITE, rules_from_shapes
from evenly.structure import flatten
from evenly.team.answer import Answer, RemotePacked, RemoteTensor
from evenly.team.values import peek
from evenly.trials import Found, Trials

if TYPE_CHECKING:
    from evenly.batch import SplitPlan
    from evenly.parts import Unit
    from evenly.replicated import Replicated

_FEW_ROWS = (3, 2)
"""Rows of the two parts of a first probe: uneven, and few."""
_MOST_KNOWN = 256
"""Kinds of calls to remember; a model that is called in ever new ways is probed again now and then."""
_LONGEST_OPTION = 32


class Outputs:
    """What is known of a model's outputs.

    Args:
        model: The module and its replicas.
        out_dims, scalar_outputs: What the user said; see :class:`evenly.DataParallel`.
    """

    def __init__(self, model: Replicated, out_dims: Any, scalar_outputs: Any) -> None:
        self.model = model
        self.out_dims = out_dims
        self.scalar_outputs = scalar_outputs
        self._trials = Trials(model)
        self._known: dict[Hashable, Found] = {}
        self._silent: set[Hashable] = set()
        """Calls of which no probe told anything."""
        self._usual: dict[Hashable, Divisors] = {}
        """What the driver divided by the first time."""
        self._cleared: set[Hashable] = set()
        """Lines that divide by what does not follow the rows, and that no output of such a call comes from."""

    def join(
        self, plan: SplitPlan, output: Any, answers: Sequence[Answer], base: int,
        given: Given = (), divisors: Sequence[Divisors] = (),
    ) -> Join:  # fmt: skip
        """Join the outputs of a call: the driver's ``output`` and the other replicas' ``answers``.

        Args:
            plan: How the arguments were split.
            output: The driver's.
            answers: The other replicas'.
            base: The number of the first of their tensors.
            given: The driver's own arguments, each with the tensor of the user's that it is, or has rows of.
            divisors: By what the replicas' forwards divided.

        Raises:
            ValueError: They cannot be joined; the message names the path.
        """
        leaves, tree = flatten(output, root="output", objects=True)
        key = (
            self.model.version,
            self.model.module.training,
            tuple([(unit.path, *_look(unit)) for unit in plan.leaves]),
            tree.signature,
            tuple([leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves]),
        )
        found = self._known.get(key)
        if found is not None and not self._holds(found, output, answers, base):
            found = None
        rules, shape = found or self._find(key, plan, output, answers)
        told = rules
        if self.out_dims is not ... or self.scalar_outputs is not None:
            parts = shape.flatten_up_to(output, "output")
            rules = override_rules(shape, parts, rules, out_dims=self.out_dims, scalar_outputs=self.scalar_outputs)
        usual = self._usual.setdefault(key, divisors[0]) if divisors else {}
        doubts = [doubt for doubt in suspects(divisors, plan.rows, usual) if (key, doubt.line) not in self._cleared]
        # Who said what a number is need not be asked again.
        guessed = [place for place, rule in enumerate(rules) if isinstance(rule, (Mean, Sum)) and rule is told[place]]
        for doubt in doubts if guessed else ():
            refuted = self._refuted(plan, doubt, rules, guessed, usual)
            if refuted is not None:
                raise ValueError(doubt.complaint(list(shape.paths("output"))[refuted], plan.rows))
            self._cleared.add((key, doubt.line))
        packed = next((layout_of(unit.value) for unit in plan.leaves if isinstance(unit, Packed)), None)
        joiner = Joiner(self.model.team, plan.rows, shape, rules, self.model.leaf_ids, packed, given)
        return joiner.join(output, answers, base)

    def _holds(self, found: Found, output: Any, answers: Sequence[Answer], base: int) -> bool:
        """Whether what is known can still be true: what was the same for all rows so far must be so again."""
        rules, tree = found
        if not any(map(_may_change, rules)):
            return True
        try:
            own = tree.flatten_up_to(output, "output")
            others = [tree.flatten_up_to(answer.output, "output") for answer in answers]
        except ValueError:
            return False
        for place, rule in enumerate(rules):
            local = own[place]
            if not _may_change(rule) or not isinstance(local, Tensor) or local.numel() != 1:
                continue
            remote = [leaves[place] for leaves in others]
            if not all(isinstance(part, RemoteTensor) for part in remote):
                return False
            values = [peek(self.model.team, replica, base + part.position) for replica, part in enumerate(remote, 1)]
            if not all(agree(local, value) for value in values):
                return False
            if isinstance(rule, Unknown) and Sum() in rule.candidates and bool(local != 0):
                return False
        return True

    def _find(self, key: Hashable, plan: SplitPlan, output: Any, answers: Sequence[Answer]) -> Found:
        """Probe, and remember what fits; where no probe does, this call's shapes have to tell."""
        if len(self._known) + len(self._silent) > _MOST_KNOWN:
            self._known.clear()
            self._silent.clear()
            self._cleared.clear()
            self._usual.clear()
        outputs = [output, *(_as_meta(answer.output) for answer in answers)]
        second: Found | None = None
        for found, whole, proven in self._probes(plan) if key not in self._silent else ():
            if not _fits(found, whole, outputs, plan.rows):
                continue
            if not any(isinstance(rule, Unknown) for rule in found[0]):
                self._known[key] = found
                return found
            second = found if proven else second or found
        if second is not None and any(isinstance(rule, Unknown) and rule.reason == NOT_FINITE for rule in second[0]):
            return self._probe_finite(plan, outputs, second)
        if second is not None:
            self._known[key] = second
            return second
        self._silent.add(key)
        found = rules_from_shapes(outputs, plan.rows)
        if not any(isinstance(rule, Unknown) for rule in found[0]):  # what even rows left open, uneven ones may tell
            self._known[key] = found
        return found

    def _probes(self, plan: SplitPlan) -> Iterator[tuple[Found, Any, bool]]:
        """Probe in several ways, the likeliest to tell first; the caller takes the first that does.

        Yields:
            What was found; the output for all rows; whether it is proven, because nothing random was in it, that no
            rule holds in the mode of the call. Then the other mode is not asked: a model that mixes rows only in
            training must not be joined by what it does in evaluation.
        """
        size = plan.size or 1
        mode = self.model.module.training
        counts = [_FEW_ROWS] if size <= sum(_FEW_ROWS) else [_FEW_ROWS, (size // 2 + 1, size - size // 2 - 1)]
        refuted = False
        for rows in counts:
            for way in self._trials.ways():
                if refuted and way.training != mode:
                    continue
                tried = self._trials.run(plan, _repeated(plan, sum(rows)), rows, way)
                if tried is None:
                    continue
                unruled = any(isinstance(rule, Unknown) and not rule.candidates for rule in tried.found[0])
                proven = unruled and way.training == mode and tried.repeats
                refuted = refuted or proven
                yield tried.found, tried.whole, proven

    def _probe_finite(self, plan: SplitPlan, outputs: Sequence[Any], found: Found) -> Found:
        """Learn from rows made finite what those of this call do not tell: their loss is infinite, or not a number.

        It is not remembered, because a mean over labels looks like one over rows once none of them is ignored.
        """
        for way in self._trials.ways():
            try:
                tried = self._trials.run(plan, _repeated(plan, sum(_FEW_ROWS)), _FEW_ROWS, way, finite=True)
            except SumsPerRowError:
                continue
            if tried is None:
                continue
            rules, tree = tried.found
            if _fits(tried.found, tried.whole, outputs, plan.rows) and len(rules) == len(found[0]):
                unclear = [isinstance(rule, Unknown) and rule.reason == NOT_FINITE for rule in found[0]]
                return [
                    new if is_unclear else old for old, new, is_unclear in zip(found[0], rules, unclear, strict=True)
                ], tree
        return found

    def _refuted(
        self, plan: SplitPlan, doubt: Suspect, rules: Sequence[OutputRule], places: list[int], usual: Divisors
    ) -> int | None:
        """Which of the outputs at ``places`` is not what its rule says, on rows that divide by what is in doubt.

        Returns:
            None if all are what the rules say. An output of which this cannot be seen is refuted, too.
        """
        starts = list(accumulate(plan.rows, initial=0))
        first, second = (list(range(starts[replica], starts[replica + 1])) for replica in doubt.replicas)
        if len(first) == len(second):
            first *= 2  # a probe needs parts of different sizes
        counts = (len(first), len(second))
        refuted = places[0]
        for way in self._trials.ways():
            tried = self._trials.run(plan, first + second, counts, way)
            if tried is None:
                continue
            found, _ = tried.found
            broken = [place for place in places if len(found) != len(rules) or not _still(rules[place], found[place])]
            if broken:
                refuted = broken[0]
                if way.training == self.model.module.training and tried.repeats:
                    return refuted
            elif any(suspect.line == doubt.line for suspect in suspects(tried.divisors[1:3], counts, usual)):
                return None
        return refuted


def _repeated(plan: SplitPlan, count: int) -> list[int]:
    """The first rows of the batch, again and again if it has too few."""
    return [row % (plan.size or 1) for row in range(count)]


def _still(rule: OutputRule, found: OutputRule) -> bool:
    """Whether a rule fits what another probe has found."""
    if isinstance(found, Unknown):
        return rule in found.candidates and found.reason != NOT_FINITE
    return found == rule or isinstance(found, Constant)


def _look(unit: Unit) -> tuple[Hashable, ...]:
    """What of an argument may decide on the kind of the output: where its rows are, and which option it is."""
    value = unit.value
    if unit.tensors:
        return tuple([(leaf.value.dim(), leaf.dim) for leaf in unit.tensors])
    if value is None or isinstance(value, (bool, Enum)) or (isinstance(value, str) and len(value) <= _LONGEST_OPTION):
        return (type(value).__qualname__, value)
    return (type(value).__qualname__,)


def _as_meta(output: Any) -> Any:
    """A replica's output with tensors that have only shapes."""
    leaves, tree = flatten(output, root="output", objects=True)
    made: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, RemoteTensor):
            made.append(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
        elif isinstance(leaf, RemotePacked):
            made.append(leaf.layout.pack(torch.empty(leaf.data.shape, dtype=leaf.data.dtype)))
        else:
            made.append(leaf)
    return tree.rebuild(made)


def _may_change(rule: OutputRule) -> bool:
    """Whether a rule is a guess from a value that was the same for all rows seen."""
    return (
        isinstance(rule, Constant)
        or (isinstance(rule, Mean) and not rule.sure)
        or (isinstance(rule, Unknown) and bool(rule.candidates))
    )


def _fits(found: Found, whole: Any, outputs: Sequence[Any], rows: Sequence[int]) -> bool:
    """Whether what a probe found can be true of these outputs.

    It may be about other outputs: those of eval mode, say. Sizes beside the rows may differ, as with padding to the
    longest of a shard: joining refuses that, and says what to do.
    """
    rules, tree = found
    try:
        probed = tree.flatten_up_to(whole, "output")
        parts = [tree.flatten_up_to(output, "output") for output in outputs]
    except ValueError:
        return False
    return all(
        _fits_leaf(rule, example, values, rows)
        for rule, example, values in zip(rules, probed, zip(*parts, strict=True), strict=True)
    )


def _fits_leaf(rule: OutputRule, example: Any, values: Sequence[Any], rows: Sequence[int]) -> bool:
    if not isinstance(example, Tensor):
        kind = (
            (list, tuple) if isinstance(rule, SampleList) else PackedSequence if isinstance(rule, PackedRows) else None
        )
        return all(isinstance(value, kind) if kind else not isinstance(value, Tensor) for value in values)
    if not all(isinstance(value, Tensor) and value.dim() == example.dim() for value in values):
        return False
    if isinstance(rule, Rows):
        return all(value.shape[rule.dim] == rule.factor * count for value, count in zip(values, rows, strict=True))
    return isinstance(rule, Unknown) or all(value.shape == example.shape for value in values)
