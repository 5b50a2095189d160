"""Between the driver's autograd graph and the replicas' graphs: one autograd function.

Seen from the driver, the whole model is one node: parameters and inputs go in, sharded outputs come out. Its backward
has every replica run its own graph and returns the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenly.call import Call
    from evenly.joining import Join, Joiner
    from evenly.team.answer import Answer


def run(call: Call, joiner: Callable[[Any, Sequence[Answer]], Joiner]) -> Any:
    """Run a call and return its joined output, in the driver's autograd graph where gradients are wanted."""
    inputs = [position for position, leaf in enumerate(call.leaves) if leaf.value.requires_grad]
    if not torch.is_grad_enabled() or not (call.parameters or inputs):
        join = call.forward(joiner, graph=False)
        return join.build(join.take())
    values = [call.leaves[position].value for position in inputs]
    state = _State(call, joiner, inputs)
    outputs = cast("tuple[Tensor, ...] | None", _Bridge.apply(state, *call.parameters, *values))
    join = state.join
    assert join is not None  # noqa: S101 - set by the forward
    return join.build(outputs or ())


class _State:
    """What forward and backward of one bridge share."""

    __slots__ = ("call", "inputs", "join", "joiner")

    def __init__(self, call: Call, joiner: Callable[[Any, Sequence[Answer]], Joiner] | None, inputs: list[int]) -> None:
        self.call = call
        self.joiner = joiner
        self.inputs = inputs
        self.join: Join | None = None


class _Bridge(torch.autograd.Function):
    """The model as one node of the driver's graph."""

    @staticmethod
    def forward(ctx: Any, state: _State, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        assert state.joiner is not None  # noqa: S101
        join = state.join = state.call.forward(state.joiner, graph=True)
        state.joiner = None
        ctx.call, ctx.inputs = state.call, state.inputs
        ctx.set_materialize_grads(False)
        outputs = join.take()
        passive = [tensor for tensor, joint in zip(outputs, join.joints, strict=True) if not joint.differentiable]
        ctx.mark_non_differentiable(*passive)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call = cast("Call", ctx.call)
        keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore
        if all(gradient is None for gradient in gradients):
            return (None,) * (1 + len(call.parameters) + len(ctx.inputs))
        with call.team.lock:
            parameters, inputs = call.backward(gradients, ctx.inputs, keep=keep)
        return (None, *parameters, *inputs)
