"""Running a model on a few rows, whole and in two parts, in a replica, to see what its outputs depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from evenly.batchwide import SumsPerRowError
from evenly.divisors import Divisors
from evenly.joining import agree
from evenly.outputs import OutputRule
from evenly.probe import infer_rules
from evenly.structure import Tree, flatten
from evenly.team.context import capture, probing_context
from evenly.team.errors import ReplicaDied
from evenly.team.protocol import DTYPE_NUMBER, Command, encode, receive_tensor, wire_forms
from evenly.team.shipping import pack, unpack

if TYPE_CHECKING:
    from evenly.batch import SplitPlan
    from evenly.replicated import Replicated

_LARGEST_COPY = 1 << 28
"""Bytes of parameters that may be copied for a probe in another precision."""

Found: TypeAlias = tuple[list[OutputRule], Tree]
"""A rule for each leaf of an output, and its structure."""


class Way(NamedTuple):
    """How to run a probe.

    Attributes:
        training: As the module is, rather than in eval mode.
        autocast: As the caller says, rather than without.
        dtype: Instead of the module's own.
    """

    training: bool
    autocast: bool
    dtype: torch.dtype | None = None


class Trial(NamedTuple):
    """What a probe told.

    Attributes:
        found: The rules.
        whole, again: The output for all rows, and that of the second time.
        divisors: By what the four runs divided.
    """

    found: Found
    whole: Any
    again: Any
    divisors: Sequence[Divisors]

    @property
    def repeats(self) -> bool:
        """Whether nothing random is in the output."""
        return _same(self.whole, self.again)


class Trials:
    """Tries a model out.

    Args:
        model: The module and its replicas, of which the first one is asked.
    """

    def __init__(self, model: Replicated) -> None:
        self.model = model

    def ways(self) -> list[Way]:
        """How to probe, the likeliest to tell first.

        In the mode of the call before eval mode, where nothing is random; without autocast, whose rounding hides what
        is a sum; in the model's own precision, or a higher one where that is too coarse to tell.
        """
        modes = (True, False) if self.model.module.training else (False,)
        floating = {leaf.dtype for leaf in self.model.leaves if leaf.is_floating_point()}
        coarse = bool(floating & {torch.float16, torch.bfloat16})
        own = [Way(training, autocast=False) for training in modes]
        ways = [*own]
        if sum(leaf.numel() * leaf.element_size() for leaf in self.model.leaves) <= _LARGEST_COPY:
            precise = [way._replace(dtype=torch.float32 if coarse else torch.float64) for way in own]
            ways = [*precise, *own] if coarse else [*own, *precise]
        if torch.is_autocast_enabled("cpu"):
            ways += [way._replace(autocast=True) for way in own]
        return ways

    def run(
        self, plan: SplitPlan, rows: list[int], counts: tuple[int, int], way: Way, *, finite: bool = False
    ) -> Trial | None:
        """What a probe on some rows in two parts tells; None where the model does not run on them, or in this way."""
        try:
            whole, part_a, part_b, again, divisors = self._outputs(plan, rows, counts, way, finite=finite)
            return Trial(infer_rules(whole, part_a, part_b, counts, again=again), whole, again, divisors)
        except (ReplicaDied, SumsPerRowError):
            raise
        except Exception:  # a model that needs more rows, say
            return None

    def _outputs(
        self, plan: SplitPlan, rows: list[int], counts: tuple[int, int], way: Way, *, finite: bool = False
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


def _same(output: Any, again: Any) -> bool:
    """Whether two runs returned the same values."""
    found, expected = (flatten(value, root="output")[0] for value in (output, again))
    tensors = [isinstance(leaf, Tensor) for leaf in found]
    if tensors != [isinstance(leaf, Tensor) for leaf in expected]:
        return False
    return all(
        agree(*pair) for pair, is_tensor in zip(zip(found, expected, strict=True), tensors, strict=True) if is_tensor
    )
