"""How a model's outputs depend on the batch: asked of one replica once, then remembered."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenly.joining import Joiner
from evenly.outputs import OutputRule, PackedRows, Rows, check_tensor_metas, override_rules
from evenly.probe import infer_rules, rules_from_shapes
from evenly.structure import Tree, flatten
from evenly.team.answer import Answer, RemotePacked, RemoteTensor
from evenly.team.context import capture
from evenly.team.protocol import Command, encode, receive_tensor, wire_forms
from evenly.team.shipping import pack, unpack

if TYPE_CHECKING:
    from evenly.batch import SplitPlan
    from evenly.replicated import Replicated

PROBE_ROWS = (3, 2)
"""Rows of the two parts of a probe: uneven, and few."""

_Found = tuple[list[OutputRule], Tree]


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

    def joiner(self, plan: SplitPlan, output: Any, answers: Sequence[Answer]) -> Joiner:
        """Who joins the outputs of a call: the driver's ``output`` and the other replicas' ``answers``."""
        leaves, tree = flatten(output, root="output")
        key = (
            self.model.version,
            self.model.module.training,
            tuple((leaf.path, leaf.value.dim(), leaf.dim) for leaf in plan.tensor_leaves()),
            tree.signature,
            tuple(leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves),
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find(plan, output, answers)
        rules, shape = found
        if self.out_dims is not ... or self.scalar_outputs is not None:
            parts = shape.flatten_up_to(output, "output")
            rules = override_rules(shape, parts, rules, out_dims=self.out_dims, scalar_outputs=self.scalar_outputs)
        return Joiner(self.model.team, plan.rows, shape, rules)

    def _find(self, plan: SplitPlan, output: Any, answers: Sequence[Answer]) -> _Found:
        outputs = [output, *(_as_meta(answer.output) for answer in answers)]
        for found in self._probes(plan):
            if _fits(found, outputs, plan.rows):
                return found
        return rules_from_shapes(outputs, plan.rows)

    def _probes(self, plan: SplitPlan) -> Iterator[_Found]:
        """Probe in eval mode; if that tells nothing of what was returned just now, in training mode."""
        for training in (False, True) if self.model.module.training else (False,):
            try:
                whole, part_a, part_b, again = self._run(plan, training=training)
                yield infer_rules(whole, part_a, part_b, PROBE_ROWS, again=again)
            except Exception:  # noqa: BLE001, S112 - a model that needs more rows, say: then shapes have to tell
                continue

    def _run(self, plan: SplitPlan, *, training: bool) -> list[Any]:
        team = self.model.team
        count, first = sum(PROBE_ROWS), PROBE_ROWS[0]
        rows = [row % (plan.size or 1) for row in range(count)]
        parcel = pack([plan.select(chosen) for chosen in (rows, rows[:first], rows[first:], rows)])
        specs, data = wire_forms(parcel.tensors)
        team.phase = "trying a few rows, to find out how the outputs depend on the batch"
        context = capture(team.size)
        team.ask(
            1,
            encode(
                (
                    int(Command.PROBE),
                    self.model.number,
                    context,
                    training,
                    self.model.sync_batchnorm,
                    PROBE_ROWS,
                    parcel.payload,
                    specs,
                )
            ),
            data,
        )
        answer = team.answer(1)
        if isinstance(answer, BaseException):
            raise answer
        payload, specs = answer
        return unpack(payload, [receive_tensor(team.channel(1), spec) for spec in specs])


def _as_meta(output: Any) -> Any:
    """A replica's output with tensors that have only shapes."""
    leaves, tree = flatten(output, is_leaf=lambda value: isinstance(value, (RemoteTensor, RemotePacked)), root="output")
    made: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, RemoteTensor):
            made.append(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
        elif isinstance(leaf, RemotePacked):
            made.append(leaf.layout.pack(torch.empty(leaf.data.shape, dtype=leaf.data.dtype)))
        else:
            made.append(leaf)
    return tree.rebuild(made)


def _fits(found: _Found, outputs: Sequence[Any], rows: Sequence[int]) -> bool:
    """Whether what a probe found can be true of these outputs."""
    rules, tree = found
    try:
        parts = [tree.flatten_up_to(output, "output") for output in outputs]
        for path, rule, leaves in zip(tree.paths("output"), rules, zip(*parts, strict=True), strict=True):
            if isinstance(rule, (Rows, PackedRows)) and all(
                isinstance(leaf, (Tensor, PackedSequence)) for leaf in leaves
            ):
                bare = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves]
                check_tensor_metas(path, rule, [(leaf.shape, leaf.dtype) for leaf in bare], rows)
    except ValueError:
        return False
    return True
