"""Between the driver's autograd graph and the replicas' graphs: one autograd function.

Seen from the driver, the whole model is one node: parameters and inputs go in, sharded outputs come out. Its backward
has every replica run its own graph and returns the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from evenly.ends import lies_elsewhere
from evenly.sharded import plain
from evenly.untraced import untraced

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenly.call import Call
    from evenly.joining import Join
    from evenly.reverse import Reverse
    from evenly.team.answer import Answer


def run(call: Call, joiner: Callable[[Any, Sequence[Answer], int], Join]) -> Any:
    """Run a call and return its joined output, in the driver's autograd graph where gradients are wanted."""
    inputs = [position for position, leaf in enumerate(call.leaves) if leaf.value.requires_grad]
    if not torch.is_grad_enabled():
        join, _ = call.forward(joiner, graph=False)
        return join.build(join.take())
    tensors = [*call.parameters, *(call.leaves[position].value for position in inputs)]
    # What forward returns may require grad even if nothing given to it does: it may make leaves of its own.
    anchor = None if tensors else torch.empty(0, requires_grad=True)
    state = _State(call, joiner, inputs)
    outputs = cast("tuple[Tensor, ...] | None", _Bridge.apply(state, anchor, *tensors))  # pyright: ignore[reportUnknownMemberType]
    join = state.join
    assert join is not None  # noqa: S101 - set by the forward
    return join.build(outputs or ())


class _State:
    """What forward and backward of one bridge share."""

    __slots__ = ("call", "inputs", "join", "joiner")

    def __init__(
        self, call: Call, joiner: Callable[[Any, Sequence[Answer], int], Join] | None, inputs: list[int]
    ) -> None:
        self.call = call
        self.joiner = joiner
        self.inputs = inputs
        self.join: Join | None = None


class _Bridge(torch.autograd.Function):
    """The model as one node of the driver's graph."""

    @staticmethod
    def forward(ctx: Any, state: _State, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        del anchor
        assert state.joiner is not None  # noqa: S101
        join, ctx.reverse = state.call.forward(state.joiner, graph=True)
        state.join, state.joiner = join, None
        ctx.call, ctx.inputs = state.call, state.inputs
        ctx.set_materialize_grads(False)
        # Kept for gradients of gradients, which flow to the same tensors; the call refers to them anyway. An input that
        # has been changed by then has another history, and autograd says so.
        count = len(tensors) - len(state.inputs)
        ctx.parameters = tensors[:count]
        ctx.save_for_backward(*tensors[count:])
        outputs = join.take()
        passive = [tensor for tensor, joint in zip(outputs, join.joints, strict=True) if not joint.differentiable]
        ctx.mark_non_differentiable(*passive)
        if state.call.changed:
            return outputs + _changed(ctx, state.call, tensors)
        return outputs

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        reverse = cast("Reverse", ctx.reverse)
        keep = _keeps_graph()
        gradients = _without_changed(reverse.call, gradients)
        if all(gradient is None for gradient in gradients):
            return (None,) * (2 + len(ctx.parameters) + len(ctx.inputs))
        if torch.is_grad_enabled():  # create_graph=True
            bridge = cast("Any", _GradientBridge)
            return (
                None,
                None,
                *bridge.apply(
                    reverse, ctx.inputs, keep, len(gradients), *gradients, *ctx.parameters, *ctx.saved_tensors
                ),
            )
        gradients = _brought(reverse, gradients)
        with reverse.team.lock:
            found = reverse.run(gradients, ctx.inputs, keep=keep)
        return (None, None, *found.parameters, *found.inputs)


def _changed(ctx: Any, call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Arguments that forward changed in place: to autograd they come out of the model."""
    dirty = {id(call.leaves[position].value) for position in call.changed}
    changed = tuple(tensor for tensor in tensors if id(tensor) in dirty)
    ctx.mark_dirty(*changed)
    return changed


def _without_changed(call: Call, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients without those of arguments that were changed in place.

    Raises:
        RuntimeError: There are some, or gradients of gradients are wanted.
    """
    if not call.changed:
        return gradients
    count = len(call.first_ends)
    path = call.leaves[min(call.changed)].path
    if any(gradient is not None for gradient in gradients[count:]):
        message = (
            f"{path} was changed in place by forward and used afterwards, which has no gradient: pass a copy of it"
        )
        raise RuntimeError(message)
    if torch.is_grad_enabled():
        message = f"{path} was changed in place by forward, and has no gradient of second order then: pass a copy of it"
        raise RuntimeError(message)
    return gradients[:count]


class _GradientBridge(torch.autograd.Function):
    """The backward of the model as one node of the driver's graph.

    Incoming gradients, parameters and inputs go in, gradients of parameters and inputs come out.
    """

    @staticmethod
    def forward(
        ctx: Any, reverse: Reverse, inputs: list[int], keep: bool, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gradients = _brought(reverse, tensors[:count])
        ctx.set_materialize_grads(False)
        with reverse.team.lock:
            found = reverse.run(gradients, inputs, keep=keep, again=True)
        ctx.reverse, ctx.inputs, ctx.count = found.reverse, inputs, count
        ctx.flowing = [number for number, gradient in enumerate(gradients) if gradient is not None]
        return (*found.parameters, *found.inputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        reverse = cast("Reverse", ctx.reverse)
        with torch.no_grad():
            gradients = _brought(reverse, gradients)
        with torch.no_grad(), reverse.team.lock:
            found = reverse.run(gradients, ctx.inputs, keep=_keeps_graph(), flows=ctx.flowing)
        flows: list[Tensor | None] = [None] * ctx.count
        for number, flow in zip(ctx.flowing, found.flows, strict=True):
            flows[number] = flow
        results = (None, None, None, None, *flows, *found.parameters, *found.inputs)
        return _no_further(results) if torch.is_grad_enabled() else results


def _brought(reverse: Reverse, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of which none lies with other replicas than those they go to; see :func:`evenly.ends.bring`."""
    team = reverse.team
    return tuple(
        [
            plain(gradient) if gradient is not None and lies_elsewhere(team, gradient) else gradient
            for gradient in gradients
        ]
    )


def _no_further(results: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of second order that say, when somebody wants to go further, that there is no way."""
    message = (
        "evenly gives gradients of first and second order: this one would be of third order. Compute it on the bare "
        "module (model.module)"
    )
    present = [result.detach().requires_grad_() for result in results if result is not None]
    error = cast("Any", torch._C)._functions.DelayedError  # torch's own way to refuse when it comes to it
    refusing = iter(error(message.encode(), len(present))(*present))
    return tuple([None if result is None else next(refusing) for result in results])


def _keeps_graph() -> bool:
    """Whether the backward that is running leaves the graph for another one."""
    return bool(cast("Any", torch._C)._autograd._get_current_graph_task_keep_graph())
