"""Forward and backward of one shard, as every replica runs them, the driver's own included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Graph:
    """One shard's forward, kept for its backward: the ends of an autograd graph that stays in its process.

    Attributes:
        outputs: Tensors of the output, in order, with their autograd history.
        inputs: Tensors of the input that want a gradient, by position; each is a leaf.
    """

    outputs: list[Tensor]
    inputs: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


def backward(
    graph: Graph, gradients: dict[int, Tensor], leaves: Sequence[Tensor], *, keep: bool
) -> tuple[list[Tensor | None], dict[int, Tensor | None]]:
    """Gradients of one shard.

    ``torch.autograd.backward`` is used rather than ``grad``, because re-entrant checkpointing inside the model
    works only with it. What the user's parameters hold in ``.grad``, and their hooks, are kept out of it: both
    belong to the total, which the driver's own graph delivers.

    Args:
        graph: The shard's forward.
        gradients: By position of the output.
        leaves: Parameters, in the order of the answer; those not requiring grad get None.
        keep: Whether the graph will be needed again.

    Returns:
        Gradients of the leaves, and of the inputs by position. None where nothing flowed.
    """
    outputs = [graph.outputs[position] for position in gradients]
    inputs = list(graph.inputs.values())
    targets = [*leaves, *inputs]
    before = [target.grad for target in targets]
    with _without_hooks(targets):
        for target in targets:
            target.grad = None
        try:
            if outputs:
                torch.autograd.backward(outputs, list(gradients.values()), retain_graph=keep)
            found = [target.grad for target in targets]
        finally:
            for target, gradient in zip(targets, before, strict=True):
                target.grad = gradient
    count = len(leaves)
    return found[:count], dict(zip(graph.inputs, found[count:], strict=True))


@contextlib.contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Silence the hooks on leaves: they are for the total over all replicas, once."""
    silenced: list[tuple[dict[int, object], dict[int, object]]] = []
    for leaf in leaves:
        for hooks in (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)):  # pyright: ignore[reportPrivateUsage]
            if hooks:
                silenced.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, content in silenced:
            hooks.update(content)
