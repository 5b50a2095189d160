"""How a model's outputs depend on the batch: asked of one replica once, then remembered."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
from evenly.probe import NOT_FINITE, infer_rules, rules_from_shapes
from evenly.structure import Tree, flatten
from evenly.team.answer import Answer, RemotePacked, RemoteTensor
from evenly.team.context import capture, probing_context
from evenly.team.errors import ReplicaDied
from evenly.team.protocol import DTYPE_NUMBER, Command, encode, receive_tensor, wire_forms
from evenly.team.shipping import pack, unpack
from evenly.team.values import peek

if TYPE_CHECKING:
    from evenly.batch import SplitPlan
    from evenly.parts import Unit
    from evenly.replicated import Replicated

_FEW_ROWS = (3, 2)
"""Rows of the two parts of a first probe: uneven, and few."""
_MOST_KNOWN = 256
"""Kinds of calls to remember; a model that is called in ever new ways is probed again now and then."""
_LONGEST_OPTION = 32
_LARGEST_COPY = 1 << 28
"""Bytes of parameters that may be copied for a probe in another precision."""

_Found = tuple[list[OutputRule], Tree]


class _Way(NamedTuple):
    """How to run a probe.

    Attributes:
        training: As the module is, rather than in eval mode.
        autocast: As the caller says, rather than without.
        dtype: Instead of the module's own.
    """

    training: bool
    autocast: bool
    dtype: torch.dtype | None = None


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
        self._known: dict[Hashable, _Found] = {}
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

    def _holds(self, found: _Found, output: Any, answers: Sequence[Answer], base: int) -> bool:
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

    def _find(self, key: Hashable, plan: SplitPlan, output: Any, answers: Sequence[Answer]) -> _Found:
        """Probe, and remember what fits; where no probe does, this call's shapes have to tell."""
        if len(self._known) + len(self._silent) > _MOST_KNOWN:
            self._known.clear()
            self._silent.clear()
            self._cleared.clear()
            self._usual.clear()
        outputs = [output, *(_as_meta(answer.output) for answer in answers)]
        second: _Found | None = None
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

    def _probes(self, plan: SplitPlan) -> Iterator[tuple[_Found, Any, bool]]:
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
            for way in self._ways():
                if refuted and way.training != mode:
                    continue
                try:
                    whole, part_a, part_b, again, _ = self._run(plan, _repeated(plan, sum(rows)), rows, way)
                    found = infer_rules(whole, part_a, part_b, rows, again=again)
                except (ReplicaDied, SumsPerRowError):
                    raise
                except Exception:  # noqa: S112 - a model that needs more rows, say: then shapes have to tell
                    continue
                unruled = any(isinstance(rule, Unknown) and not rule.candidates for rule in found[0])
                proven = unruled and way.training == mode and _same(whole, again)
                refuted = refuted or proven
                yield found, whole, proven

    def _probe_finite(self, plan: SplitPlan, outputs: Sequence[Any], found: _Found) -> _Found:
        """Learn from rows made finite what those of this call do not tell: their loss is infinite, or not a number.

        It is not remembered, because a mean over labels looks like one over rows once none of them is ignored.
        """
        for way in self._ways():
            try:
                chosen = _repeated(plan, sum(_FEW_ROWS))
                whole, part_a, part_b, again, _ = self._run(plan, chosen, _FEW_ROWS, way, finite=True)
                rules, tree = infer_rules(whole, part_a, part_b, _FEW_ROWS, again=again)
            except ReplicaDied:
                raise
            except Exception:  # noqa: S112 - it may not like these rows
                continue
            if _fits((rules, tree), whole, outputs, plan.rows) and len(rules) == len(found[0]):
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
        for way in self._ways():
            try:
                whole, part_a, part_b, again, divisors = self._run(plan, first + second, counts, way)
                found, _ = infer_rules(whole, part_a, part_b, counts, again=again)
            except (ReplicaDied, SumsPerRowError):
                raise
            except Exception:  # noqa: S112 - it may not like these rows
                continue
            broken = [place for place in places if len(found) != len(rules) or not _still(rules[place], found[place])]
            if broken:
                refuted = broken[0]
                if way.training == self.model.module.training and _same(whole, again):
                    return refuted
            elif any(suspect.line == doubt.line for suspect in suspects(divisors[1:3], counts, usual)):
                return None
        return refuted

    def _ways(self) -> list[_Way]:
        """How to probe, the likeliest to tell first.

        In the mode of the call before eval mode, where nothing is random; without autocast, whose rounding hides what
        is a sum; in the model's own precision, or a higher one where that is too coarse to tell.
        """
        modes = (True, False) if self.model.module.training else (False,)
        floating = {leaf.dtype for leaf in self.model.leaves if leaf.is_floating_point()}
        coarse = bool(floating & {torch.float16, torch.bfloat16})
        own = [_Way(training, autocast=False) for training in modes]
        ways = [*own]
        if sum(leaf.numel() * leaf.element_size() for leaf in self.model.leaves) <= _LARGEST_COPY:
            precise = [way._replace(dtype=torch.float32 if coarse else torch.float64) for way in own]
            ways = [*precise, *own] if coarse else [*own, *precise]
        if torch.is_autocast_enabled("cpu"):
            ways += [way._replace(autocast=True) for way in own]
        return ways

    def _run(
        self, plan: SplitPlan, rows: list[int], counts: tuple[int, int], way: _Way, *, finite: bool = False
    ) -> list[Any]:
        """Run a probe on some rows in two parts: four outputs, and the divisors of the four runs."""
        team = self.model.team
        first = counts[0]
        calls = [plan.select(chosen) for chosen in (rows, rows[:first], rows[first:], rows)]
        if finite:
            calls = _made_finite(calls)
        parcel = pack(calls, name="(args, kwargs)")
        specs, data = wire_forms(parcel.tensors)
        team.phase = "trying a few rows, to find out how the outputs depend on the batch"
        context = probing_context(capture(team.size), autocast=way.autocast, dtype=way.dtype)
        dtype = -1 if way.dtype is None else DTYPE_NUMBER[way.dtype]
        header = (
            int(Command.PROBE), self.model.number, context, way.training, dtype, self.model.sync_batchnorm, counts,
            parcel.payload, specs,
        )  # fmt: skip
        self.model.probed()
        team.ask(1, encode(header), data)
        answer = team.answer(1)
        if isinstance(answer, BaseException):
            raise answer
        payload, specs = answer
        return unpack(payload, [receive_tensor(team.channel(1), spec) for spec in specs])


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


def _made_finite(calls: Sequence[Any]) -> list[Any]:
    """The same calls with one number for those that are not finite, and no negative labels, which are ignored."""
    leaves, tree = flatten(calls, root="(args, kwargs)")
    made: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            if leaf.is_floating_point():
                made.append(leaf.detach().nan_to_num(0.5, 0.5, -0.5))
            else:
                made.append(leaf.clamp(min=0) if leaf.dtype.is_signed and not leaf.is_complex() else leaf)
        else:
            made.append(leaf)
    return cast("list[Any]", tree.rebuild(made))


def _may_change(rule: OutputRule) -> bool:
    """Whether a rule is a guess from a value that was the same for all rows seen."""
    return (
        isinstance(rule, Constant)
        or (isinstance(rule, Mean) and not rule.sure)
        or (isinstance(rule, Unknown) and bool(rule.candidates))
    )


def _same(output: Any, again: Any) -> bool:
    """Whether two runs returned the same values."""
    found, expected = (flatten(value, root="output")[0] for value in (output, again))
    tensors = [isinstance(leaf, Tensor) for leaf in found]
    if tensors != [isinstance(leaf, Tensor) for leaf in expected]:
        return False
    return all(
        agree(*pair) for pair, is_tensor in zip(zip(found, expected, strict=True), tensors, strict=True) if is_tensor
    )


def _fits(found: _Found, whole: Any, outputs: Sequence[Any], rows: Sequence[int]) -> bool:
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
