"""An operation on sharded tensors: planned by a rule, carried out here and in the replicas.

What was planned is remembered as a :class:`Step` and holds for every call that looks the same: the same operation
and settings on tensors of the same shapes, dealt out in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from evenly import rules
from evenly.rules.plan import Op, Operand, Output, Plan, aten
from evenly.sharded import conjugation, operands
from evenly.sharded.arguments import mapped
from evenly.sharded.content import Parts, Shards
from evenly.sharded.gathering import SHAPE_ONLY, note, run_gathered
from evenly.sharded.geometry import stand_in, whole_geometry
from evenly.sharded.numbers import NUMBERS, NUMBERS_IN_PLACE, pending
from evenly.sharded.tensor import ShardedTensor
from evenly.sharded.windows import again, run_window
from evenly.team import values
from evenly.team.context import threads_per_replica
from evenly.team.protocol import can_travel
from evenly.team.template import SizeOf, Slot, Template

if TYPE_CHECKING:
    from evenly.team.team import Team
    from evenly.team.values import Handle, Number

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_STEPS = 4096
"""Plans that are remembered. Sizes that change with every batch would fill the memory otherwise."""


Source: TypeAlias = "tuple[int, rules.Cut | rules.Divided | None]"
"""What goes into a slot: an operand by position, or its rows, or a quotient."""
Geometry: TypeAlias = "tuple[Sequence[int], Sequence[int], int]"
"""Shape, strides and offset of a whole tensor."""


@dataclass(eq=False, slots=True)
class Step:
    """How to carry out a call.

    Attributes:
        plan: What the rule said.
        template: The operation with a slot for each operand.
        sources: What goes into the slots.
        lead: The first operand that is sharded.
        replicas: How many take part.
        geometries: What the results are as a whole; known after the first time.
    """

    plan: Plan
    template: Template
    sources: list[Source]
    lead: int
    replicas: int
    geometries: list[Geometry] = field(default_factory=list[Geometry])


_steps: dict[Hashable, Step | None] = {}
_templates: dict[Hashable, Template] = {}
_UNSEEN: Any = object()


class _NoPlanError(Exception):
    """An argument that no rule can speak of."""


def dispatch(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of which at least one argument is a :class:`ShardedTensor`."""
    special = _SPECIAL.get(function)
    if special is not None:
        result = special(function, args, kwargs)
        if result is not None:
            return result
    tensors: list[Tensor] = []
    try:
        key = _key(function, args, kwargs, tensors)
        step = _steps.get(key, _UNSEEN)
    except (_NoPlanError, TypeError):  # TypeError: an argument that cannot be hashed
        return run_gathered(function, args, kwargs)
    if step is _UNSEEN:
        if len(_steps) >= _STEPS:
            _steps.clear()
            _templates.clear()
        step = _steps[key] = _prepare(function, args, kwargs, tensors)
    team = _team_of(tensors)
    if step is not None and team is not None and not (step.plan.in_place and args[0].must_be_whole):
        return _run(function, step, tensors, team, args, kwargs)
    if team is not None and function.has_kernel_for_dispatch_key(_COMPOSITE):
        return function.decompose(*args, **kwargs)  # in inference mode they are not taken apart before they come here
    if function.is_view and not cast("ShardedTensor", args[0]).is_plain:
        result, size = run_window(function, args, kwargs)
        note(function.name(), size)
        return result
    return run_gathered(function, args, kwargs)


def _same(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    del function, kwargs
    tensor: ShardedTensor = args[0]
    return tensor.alias()


def _shape_only(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = cast("ShardedTensor", args[0]).parts
    if parts is not None:  # it looks like each of its parts
        return function(parts.local, *args[1:], **kwargs)
    return None if cast("ShardedTensor", args[0]).shards else run_gathered(function, args, kwargs)


_SPECIAL: dict[Op, Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(SHAPE_ONLY, _shape_only),
    **dict.fromkeys((*NUMBERS, *NUMBERS_IN_PLACE), pending),
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default), _same),
}
"""What is looked at before any rule; a result of None leaves the operation to the rules."""


# ---------------------------------------------------------------------- what a call looks like


def _key(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Hashable:
    """What a plan may depend on; collects the tensors on the way."""
    looks: list[Hashable] = [function]
    for arg in args:
        kind: type[Any] = type(arg)  # pyright: ignore[reportUnknownVariableType]
        if arg is None:
            looks.append(None)
        elif kind is int or kind is bool:
            looks.append((kind, arg))
        elif kind is ShardedTensor and type(arg._content) is Shards:
            tensors.append(arg)
            looks.append(arg.looks)
        else:
            looks.append(_looks(arg, tensors))
    return (*looks, *[(name, _looks(value, tensors)) for name, value in kwargs.items()]) if kwargs else tuple(looks)


def _looks(value: Any, tensors: list[Tensor]) -> Hashable:
    """What a plan may depend on, of one argument; collects the tensors on the way."""
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is ShardedTensor:
        if value.shards is not None:
            tensors.append(value)
            return cast("Hashable", value.looks)
        value = value.plain()  # a sum is added up, once
    elif not isinstance(value, Tensor):
        if isinstance(value, (list, tuple)):
            return (kind, *[_looks(item, tensors) for item in cast("list[Any]", value)])
        if kind is float or kind is complex:
            return (kind, repr(value))  # 0.0 and -0.0 are equal, but not the same; nan is the same, but not equal
        return (kind, value)
    if value.layout is not torch.strided or not can_travel(value):
        raise _NoPlanError
    tensors.append(value)
    return (value.shape, value.stride(), value.dtype, value.device)


def _team_of(tensors: list[Tensor]) -> Team | None:
    """The team that holds all sharded operands; None if there are several, or none."""
    team: Team | None = None
    for tensor in tensors:
        if type(tensor) is ShardedTensor:
            content: Any = tensor._content
            holder: Team = content.team
            if team is None:
                team = holder
            elif team is not holder:
                return None
    return team


# ---------------------------------------------------------------------- planning


def _prepare(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Step | None:
    """Ask the rules for a plan, and turn it into an operation with slots."""
    lead = next((position for position, tensor in enumerate(tensors) if type(tensor) is ShardedTensor), None)
    if lead is None or any(tensor.device != tensors[lead].device for tensor in tensors):
        return None
    device = tensors[lead].device
    count = 0

    def describe(value: Any) -> Any:
        nonlocal count
        if isinstance(value, Tensor):
            tensor = tensors[count]
            shards = tensor.shards if isinstance(tensor, ShardedTensor) else None
            rows = None if shards is None else rules.Rows(shards.dim, shards.rows)
            count += 1
            return Operand(count - 1, tuple(tensor.shape), tensor.dtype, device, rows)
        return value

    described = tuple(mapped(arg, describe) for arg in args)
    call = rules.Call(function, described, {name: mapped(value, describe) for name, value in kwargs.items()})
    plan = rules.plan(call)
    if plan is None:
        return None
    sources: list[Source] = []
    filled = tuple(mapped(arg, _slot, sources) for arg in plan.args)
    keywords = {name: mapped(value, _slot, sources) for name, value in plan.kwargs.items()}
    template = Template(plan.function, filled, keywords)
    key = (plan.function, _looks(filled, []), _looks(tuple(keywords.items()), []))
    replicas = len(cast("Shards", cast("ShardedTensor", tensors[lead])._content).rows)
    return Step(plan, _templates.setdefault(key, template), sources, lead, replicas)


def _slot(value: Any, sources: list[Source]) -> Any:
    """What stands in a template for an argument; notes where its operand comes from."""
    if isinstance(value, (Operand, rules.Cut, rules.Divided)):
        source: Source = (value.position, None) if isinstance(value, Operand) else (value.operand.position, value)
        if source not in sources:
            sources.append(source)
        return Slot(sources.index(source))
    if isinstance(value, rules.SizeOf):
        return SizeOf(int(_slot(value.operand, sources)), value.dim)
    return value


# ---------------------------------------------------------------------- carrying out


def _run(
    function: Op,
    step: Step,
    tensors: list[Tensor],
    team: Team,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Have the replicas do their part, do the driver's, and put a tensor around both."""
    plan = step.plan
    result, remote = _compute(step, tensors, team)
    if plan.in_place:
        target = cast("ShardedTensor", args[0])
        target.written()
        return target
    results: list[Any] = [result] if isinstance(result, Tensor) else list(result)
    if not step.geometries:
        step.geometries = _geometries(function, plan, results, args, kwargs)
    outputs = [
        _output(kind, here, there, geometry, step.replicas)
        for kind, here, there, geometry in zip(plan.outputs, results, remote, step.geometries, strict=True)
    ]
    if plan.view:
        for position, output in enumerate(outputs):
            output.become_view(args[0], again(function, args[1:], kwargs, position), copied=plan.copies)
    for kind, output in zip(plan.outputs, outputs, strict=True):
        if type(kind) is rules.Parts:
            if kind.over is not None:
                output._content.over = outputs[kind.over]._content
            if kind.early is not None:
                output._content.settle(kind.early(tensors))
    return outputs[0] if isinstance(result, Tensor) else type(result)(outputs)


def _compute(step: Step, tensors: list[Tensor], team: Team) -> tuple[Any, list[Handle]]:
    """The driver's results, and handles of those of the replicas."""
    plan, template, replicas = step.plan, step.template, step.replicas
    with team.lock:
        local: list[Tensor] = []
        handles: list[Handle | Number] = []
        for position, how in step.sources:
            tensor = tensors[position]
            if type(tensor) is ShardedTensor:
                shards: Shards = tensor._content  # pyright: ignore[reportAssignmentType] - only these are operands
                local.append(shards.local)
                handles.append(shards.handle)
            else:
                here, there = _operand(tensor, how, tensors, replicas, team)
                local.append(here)
                handles.append(there)
        number = values.define(team, template, template)
        remote = values.run(team, replicas, number, handles, 0 if plan.in_place else len(plan.outputs))
        try:
            return _own(template, local, team), remote
        except Exception:
            values.pardon(team, replicas)
            raise


def _operand(
    tensor: Tensor, how: rules.Cut | rules.Divided | None, tensors: list[Tensor], replicas: int, team: Team
) -> tuple[Tensor, Handle | Number]:
    """What a plain tensor puts into a slot, here and in the replicas, unless it is there already."""
    if how is None:
        return operands.whole(tensor, replicas, team)
    if isinstance(how, rules.Cut):
        return operands.cut(tensor, how.dim, how.rows, team)
    by = how.by if isinstance(how.by, int) else tensors[how.by.position].detach()
    return operands.whole(tensor.detach() / by, replicas, team)


def _output(kind: Output, here: Tensor, there: Handle, geometry: Geometry, replicas: int) -> Any:
    """A tensor around the results of all replicas."""
    if kind is None:
        return None
    if isinstance(kind, rules.Rows):
        return ShardedTensor(Shards(there.team, here, there, kind.dim, kind.rows), *geometry)
    return ShardedTensor(Parts(there.team, here, there, replicas, kind.combine, kind.weights), *geometry)


def _own(template: Template, local: list[Tensor], team: Team) -> Any:
    """The driver's part, with its share of the cores: the replicas compute at the same time."""
    threads = torch.get_num_threads()
    share = threads if threads == 1 else threads_per_replica(team.size)
    try:
        if share != threads:
            torch.set_num_threads(share)
        for tensor in local:
            if tensor.is_conj() or tensor.is_neg():
                with conjugation.respected():
                    return template.run(local)
        return template.run(local)
    finally:
        if share != threads:
            torch.set_num_threads(threads)


def _geometries(
    function: Op, plan: Plan, results: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Geometry]:
    """What results are as a whole. A view's geometry must be that of the view of the whole, as autograd expects it."""
    if plan.view:
        found = function(stand_in(args[0]), *args[1:], **kwargs)
        views: list[Tensor] = [found] if isinstance(found, Tensor) else list(found)
        return [(view.shape, view.stride(), int(view.storage_offset())) for view in views]
    return [_geometry(kind, result) for kind, result in zip(plan.outputs, results, strict=True)]


def _geometry(kind: Output, result: Any) -> Geometry:
    if isinstance(kind, rules.Rows):
        return (*whole_geometry(result, kind.dim, kind.rows), 0)
    return ((), (), 0) if kind is None else (result.shape, result.stride(), 0)
