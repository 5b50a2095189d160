"""Forward and backward of one shard, as every replica runs them, the driver's own included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(slots=True)
class Graph:
    """One shard's forward, kept for its backward: the ends of an autograd graph that stays in its process.

    Attributes:
        outputs: Tensors of the output, in order, with their autograd history.
        inputs: Tensors of the input that want a gradient, by position; each is a leaf.
        shared: Whether parts of it belong to another graph, too. Then a backward must not free them, even the last
            one: the same step may run the other graph afterwards (a loss plus a penalty on its gradient).
    """

    outputs: Sequence[Tensor | None]
    inputs: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    shared: bool = False


def backward(
    graph: Graph,
    gradients: dict[int, Tensor],
    leaves: Sequence[Tensor],
    running: AbstractContextManager[object],
    *,
    keep: bool,
) -> tuple[list[Tensor | None], dict[int, Tensor | None]]:
    """Gradients of one shard.

    ``torch.autograd.backward`` is used rather than ``grad``, because re-entrant checkpointing inside the model
    works only with it. What the user's parameters hold in ``.grad``, and their hooks, are kept out of it: both
    belong to the total, which the driver's own graph delivers.

    Args:
        graph: The shard's forward.
        gradients: By position of the output.
        leaves: Parameters, in the order of the answer; those not requiring grad get None.
        running: Entered for as long as the graph runs. The leaves are looked at outside of it: a mode that sees
            all of torch's functions costs a microsecond and more for each look.
        keep: Whether the graph will be needed again.

    Returns:
        Gradients of the leaves, and of the inputs by position. None where nothing flowed.
    """
    outputs, gradients_in = _ends(graph, gradients)
    targets = [*leaves, *graph.inputs.values()]
    before = list(map(_grad, targets))
    with _without_hooks(targets):
        for target, gradient in zip(targets, before, strict=True):
            if gradient is not None:
                target.grad = None
        try:
            with running:
                if outputs:
                    _run_backward(outputs, gradients_in, keep=keep or graph.shared)
            found = list(map(_grad, targets))
            if any(map(torch.is_complex, targets)):  # added to as they lie in memory, so no longer to be conjugated
                found = [gradient if gradient is None else gradient.resolve_conj() for gradient in found]
        finally:
            for target, gradient in zip(targets, before, strict=True):
                target.grad = gradient
    count = len(leaves)
    return found[:count], dict(zip(graph.inputs, found[count:], strict=True))


NO_GRADIENT, LEAF, INNER = range(3)
"""What an argument is to autograd: nothing, a leaf, or something with a history."""


class _Inner(torch.autograd.Function):
    """The same values in the same memory, one step away from the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:  # noqa: ARG004
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def inner(leaf: Tensor) -> Tensor:
    """What stands for an argument that the caller computed: unlike a leaf, forward may change it in place."""
    with torch.enable_grad():
        return cast("Any", _Inner).apply(leaf)


GRADIENTS_FROM = 1 << 15
"""From this position on the inputs of a graph of gradients are what flowed into the outputs of the first graph."""


def differentiate(
    graph: Graph, gradients: dict[int, Tensor], leaves: Sequence[Tensor], running: AbstractContextManager[object]
) -> tuple[list[Tensor | None], dict[int, Tensor | None], Graph]:
    """Gradients of one shard as functions that have gradients in turn.

    Args:
        graph: The shard's forward; it is kept.
        gradients: By position of the output.
        leaves: Parameters, in the order of the answer.
        running: As for :func:`backward`.

    Returns:
        As :func:`backward`, and the graph of these gradients. Its outputs are those of the leaves, then those of the
        inputs; its inputs are those of ``graph``, and the incoming gradients from :data:`GRADIENTS_FROM` on.
    """
    flowing = {position: gradient.detach().requires_grad_() for position, gradient in gradients.items()}
    outputs, gradients_in = _ends(graph, flowing)
    targets = [*leaves, *graph.inputs.values()]
    wanted = [target for target in targets if target.requires_grad]
    found: list[Tensor | None] = [None] * len(targets)
    with _without_hooks(targets), torch.enable_grad(), running:
        if outputs and wanted:
            grads = iter(torch.autograd.grad(outputs, wanted, gradients_in, create_graph=True, allow_unused=True))
            found = [next(grads) if target.requires_grad else None for target in targets]
    flows = {GRADIENTS_FROM + position: gradient for position, gradient in flowing.items()}
    second = Graph(found, {**graph.inputs, **flows}, shared=True)
    # Apart from the graph, and no longer to be conjugated: they are added to in place, as they lie in memory.
    values = [None if gradient is None else gradient.detach().resolve_conj().clone() for gradient in found]
    count = len(leaves)
    return values[:count], dict(zip(graph.inputs, values[count:], strict=True)), second


def _run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, keep: bool) -> None:
    # What torch.autograd.backward ends in. Its checks, 20 us, are of what the driver's autograd has checked already.
    torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(gradients), keep, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _ends(graph: Graph, gradients: dict[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that gradients flow into, and the gradients."""
    pairs = [(graph.outputs[position], gradient) for position, gradient in gradients.items()]
    kept = [(output, gradient) for output, gradient in pairs if output is not None and output.requires_grad]
    return [output for output, _ in kept], [gradient for _, gradient in kept]


@contextlib.contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Generator[None]:
    """Silence the hooks on leaves: they are for the total over all replicas, once."""
    silenced: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for look in (_hooks, _hooks_after):
        for hooks in filter(None, map(look, leaves)):
            silenced.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, content in silenced:
            hooks.update(content)


_grad = cast("Callable[[Tensor], Tensor | None]", attrgetter("grad"))
_hooks = cast("Callable[[Tensor], dict[int, Any] | None]", attrgetter("_backward_hooks"))
_hooks_after = cast("Callable[[Tensor], dict[int, Any] | None]", attrgetter("_post_accumulate_grad_hooks"))
