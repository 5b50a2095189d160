"""One tensor to the user, rows on many devices.

A :class:`ShardedTensor` looks like the tensor of the whole batch. Its rows stay where they were computed: the first
ones here, the others in the replicas. Operations reach it *below* autograd, so the driver's autograd graph is an
ordinary one. What an operation does to shards is looked up in :mod:`evenly.rules`; what is not known there is done on
the gathered tensor, exactly as PyTorch would.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor

from evenly import rules
from evenly.team import values
from evenly.team.template import Slot, Template, key_of

if TYPE_CHECKING:
    from evenly.team.team import Team
    from evenly.team.values import Handle

gathered: Counter[str] = Counter()
"""How often each operation had to gather its operands, by its name."""

LARGE_BYTES = 1 << 20
"""Gathering more than this for one operation is worth a warning, once per operation."""


@dataclass(slots=True)
class Shards:
    """Rows of a tensor, dealt out along one dimension.

    Attributes:
        team: Whose replicas hold them.
        local: The driver's rows.
        handle: The other replicas' rows.
        dim: The dimension that is dealt out.
        rows: Its size in each replica that takes part.
    """

    team: Team
    local: Tensor
    handle: Handle
    dim: int
    rows: tuple[int, ...]

    def gather(self, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """The whole tensor, here."""
        whole = torch.empty_strided(shape, stride, dtype=self.local.dtype, device=self.local.device)
        pieces = whole.split(self.rows, self.dim)
        pieces[0].copy_(self.local)
        with self.team.lock:
            values.fetch(self.team, [self.handle], len(self.rows), [[piece] for piece in pieces[1:]])
        return whole

    def scatter(self, whole: Tensor) -> Shards:
        """The same layout with the rows of another tensor of the same shape."""
        pieces = whole.split(self.rows, self.dim)
        with self.team.lock:
            return Shards(self.team, pieces[0], values.put(self.team, pieces[1:]), self.dim, self.rows)


@dataclass(slots=True)
class Parts:
    """A value of which every replica holds a part: their sum (or another combination) is the value.

    Attributes:
        local: The driver's part.
        weights: What each part counts; with ``over``, parts and weights are values to be added up separately.
        over: A second value of the same kind which the sum of the parts is divided by.
    """

    team: Team
    local: Tensor
    handle: Handle
    replicas: int
    combine: str = "sum"
    weights: tuple[float, ...] | None = None
    over: Parts | None = None

    def value(self) -> Tensor:
        """Add up, in the order of the replicas, in at least single precision."""
        handles = [self.handle] if self.over is None else [self.handle, self.over.handle]
        with self.team.lock:
            remote = values.fetch(self.team, handles, self.replicas)
        total = self._combine([self.local, *(found[0] for found in remote)])
        if self.over is not None:
            total = total / self.over._combine([self.over.local, *(found[1] for found in remote)])
        return total.to(self.local.dtype)

    def _combine(self, parts: list[Tensor]) -> Tensor:
        low = parts[0].dtype in (torch.float16, torch.bfloat16)
        if low:
            parts = [part.float() for part in parts]
        if self.weights is not None:
            parts = [part * weight for part, weight in zip(parts, self.weights, strict=True)]
        return rules.COMBINE[self.combine](parts)


class Family:
    """Sharded tensors that share memory: one and the views of it, in the order in which they were made."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members: list[weakref.ref[ShardedTensor]] = []

    def add(self, member: ShardedTensor) -> None:
        """Take in a new member."""
        if len(self._members) > 32:  # noqa: PLR2004 - now and then, forget those that are gone
            self._members = [ref for ref in self._members if ref() is not None]
        self._members.append(weakref.ref(member))

    def living(self) -> list[ShardedTensor]:
        """The members that still exist."""
        return [member for ref in self._members if (member := ref()) is not None]


class ShardedTensor(torch.Tensor):
    """A tensor whose rows lie on several devices. It is used as the tensor of the whole batch that it stands for."""

    # What the tensor is made of: shards, parts, or (once something needed the whole in one place) a plain tensor.
    _content: Shards | Parts | Tensor
    _family: Family
    # How to make this view again from the tensor that it is a view of.
    _recipe: tuple[ShardedTensor, Callable[[Tensor], Tensor]] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(
        cls,
        content: Shards | Parts,
        shape: Sequence[int],
        stride: Sequence[int],
        offset: int = 0,
    ) -> ShardedTensor:
        local = content.local
        self = cast(
            "ShardedTensor",
            torch.Tensor._make_wrapper_subclass(  # pyright: ignore
                cls, shape, strides=stride, storage_offset=offset, dtype=local.dtype, device=local.device
            ),
        )
        self._content = content
        self._family = Family()
        self._family.add(self)
        self._recipe = None
        return self

    def _become_view(self, base: ShardedTensor, again: Callable[[Tensor], Tensor]) -> ShardedTensor:
        """Note that this tensor shares memory with ``base``, from which ``again`` makes it."""
        self._family = base._family
        self._family.add(self)
        self._recipe = (base, again)
        return self

    @classmethod
    def of_rows(cls, team: Team, local: Tensor, handle: Handle, dim: int, rows: tuple[int, ...]) -> ShardedTensor:
        """The tensor whose rows along ``dim`` are ``local`` here and ``handle`` in the other replicas."""
        shape, stride = whole_geometry(local, dim, rows)
        return cls(Shards(team, local, handle, dim, rows), shape, stride)

    @classmethod
    def of_parts(cls, parts: Parts) -> ShardedTensor:
        """The tensor whose value is made up of one part per replica, added when somebody looks."""
        return cls(parts, parts.local.shape, parts.local.stride())

    # ------------------------------------------------------------------ what it is made of

    @property
    def shards(self) -> Shards | None:
        """Where the rows are; None for a tensor that is not sharded (any more)."""
        return self._content if isinstance(self._content, Shards) else None

    @property
    def parts(self) -> Parts | None:
        """The parts of a value that has not been added up yet."""
        return self._content if isinstance(self._content, Parts) else None

    def plain(self) -> Tensor:
        """The value as a plain tensor here, outside of autograd. Rows stay where they are; a sum is added up once."""
        content = self._content
        if isinstance(content, Parts):
            self._content = content = content.value()
        if isinstance(content, Shards):
            return content.gather(self.shape, self.stride() if 0 not in self.stride() else _dense(self.shape))
        return content

    def settle(self) -> Tensor:
        """Bring the whole tensor here for good, and with it all tensors that share its memory."""
        for member in self._family.living():
            if not isinstance(member._content, Tensor):
                recipe = member._recipe
                # A view's base stands before it, and so has been settled already.
                member._content = member.plain() if recipe is None else recipe[1](plain(recipe[0]))
        return cast("Tensor", self._content)

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain one on this device. Gradients flow through it."""
        return cast("Tensor", _FullTensor.apply(self)) if _tracks(self) else self.plain().clone()

    # ------------------------------------------------------------------ operations

    @classmethod
    def __torch_dispatch__(
        cls,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _SAME_CONTENT and isinstance(args[0], ShardedTensor):
            return _alias(args[0])
        call = _call(func, args, kwargs)
        planned = None if call is None else rules.plan(call)
        if call is None or planned is None:
            return _run_gathered(func, args, kwargs)
        return _run(planned, call)

    # ------------------------------------------------------------------ what PyTorch does without dispatching

    def __repr__(self, *, tensor_contents: object = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        del tensor_contents
        text = repr(plain(self.detach()))
        if self.grad_fn is not None:
            return f"{text[:-1]}, grad_fn=<{self.grad_fn.name()}>)"
        return f"{text[:-1]}, requires_grad=True)" if self.requires_grad else text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return format(str(self), spec)

    def tolist(self) -> Any:
        """As for a plain tensor."""
        return plain(self.detach()).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As for a plain tensor. The array shares memory with this tensor, which is gathered for good."""
        if not force and _tracks(self):
            return torch.empty(0, requires_grad=True).numpy()  # raises what a plain tensor raises
        return self.settle().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self.settle().requires_grad_(_tracks(self) and self.is_leaf).__dlpack__(**options)

    def data_ptr(self) -> int:
        """Address of the whole tensor, which is gathered for good."""
        return self.settle().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of the whole tensor, which is gathered for good."""
        return self.settle().untyped_storage()

    def storage(self) -> torch.TypedStorage:
        """Memory of the whole tensor, which is gathered for good."""
        return self.settle().storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            message = (
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment; use .detach() first, as with a plain tensor"
            )
            raise RuntimeError(message)
        copy = self.plain().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return plain(self.detach()).clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    # ------------------------------------------------------------------ as an argument of a wrapped model

    evenly_shards = True
    """Tells :mod:`evenly.batch` that this tensor cannot be narrowed, and to ask :meth:`evenly_cut`."""

    def evenly_cut(self, replica: int, rows: tuple[int, ...], dim: int) -> Tensor:
        """The rows of one replica as a plain tensor here (for the driver's own rows, without a copy)."""
        shards = self.shards
        if shards is not None and replica == 0 and shards.rows == rows and shards.dim == dim:
            return shards.local
        return plain(self.detach()).split(rows, dim)[replica]


class _FullTensor(torch.autograd.Function):
    """Gathering as an operation that gradients flow through."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> Tensor:  # noqa: ARG004
        return tensor.plain().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def _tracks(tensor: Tensor) -> bool:
    return tensor.requires_grad


def plain(tensor: Tensor) -> Tensor:
    """A plain tensor with the value of ``tensor``, outside of autograd."""
    return tensor.plain() if isinstance(tensor, ShardedTensor) else tensor


# ---------------------------------------------------------------------- running operations

aten = torch.ops.aten
_SAME_CONTENT = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_EMPTY_LIKE = {aten.ones_like.default, aten.zeros_like.default, aten.empty_like.default, aten.full_like.default}
_warned: set[str] = set()


def _alias(tensor: ShardedTensor) -> Tensor:
    """Another tensor with the same content; costs nothing in the replicas."""
    content = tensor._content
    if isinstance(content, Tensor):
        return content.detach()
    other = ShardedTensor(content, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return other._become_view(tensor, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _mapped(value: Any, change: Callable[..., Any], *options: Any) -> Any:
    """An argument with ``change`` made to it, or to the items of a list of tensors.

    A closure that called itself would be a reference cycle, and keep a step's tensors until the collector comes by.
    """
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        if items and isinstance(items[0], (int, float)):
            return items
        return type(value)(_mapped(item, change, *options) for item in items)
    return change(value, *options)


def _call(func: rules.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> rules.Call | None:
    """The operation as rules see it; None when no operand is sharded, so that there is nothing to plan."""
    tensors: list[Tensor] = []
    layouts: list[rules.Rows | None] = []
    lead: Shards | None = None

    def visit(value: Any) -> Any:
        nonlocal lead
        if isinstance(value, ShardedTensor):
            shards = value.shards
            if shards is not None and (lead is None or shards.team is lead.team):
                lead = lead or shards
                layouts.append(rules.Rows(shards.dim, shards.rows))
            else:
                value = value.plain()  # a sum is added up, once; rows of another team are gathered
                layouts.append(None)
            tensors.append(value)
        elif isinstance(value, Tensor):
            layouts.append(None)
            tensors.append(value)
        return value

    if func in _EMPTY_LIKE and cast("ShardedTensor", args[0]).parts is not None:
        return None  # only its shape matters: no reason to add it up
    args = tuple(_mapped(arg, visit) for arg in args)
    kwargs = {name: _mapped(value, visit) for name, value in kwargs.items()}
    return None if lead is None else rules.Call(func, args, kwargs, tensors, layouts)


def _run(plan: rules.Plan, call: rules.Call) -> Any:
    """Carry out what a rule planned: here, and in the replicas."""
    lead = next(shards for tensor in call.tensors if (shards := _shards(tensor)) is not None)
    team, replicas = lead.team, len(lead.rows)
    with team.lock:
        local: list[Tensor] = []
        handles: list[Handle] = []

        def slot(value: Any) -> Any:
            if isinstance(value, (Tensor, rules.Cut)):
                here, there = _operand(value, team, replicas)
                local.append(here)
                handles.append(there)
                return Slot(len(local) - 1)
            return value

        args = tuple(_mapped(arg, slot) for arg in plan.args)
        kwargs = {name: _mapped(value, slot) for name, value in plan.kwargs.items()}
        template = Template(plan.function, args, kwargs)
        key = (plan.function, key_of(args), key_of(tuple(kwargs.items())))
        number = values.define(team, key, template)
        remote = values.run(team, replicas, number, handles, 0 if plan.in_place else len(plan.outputs))
        with values.only_one_report(team, replicas):
            result = template.run(local)
    if plan.in_place:
        return call.args[0]
    here = [result] if isinstance(result, Tensor) else list(result)
    outputs: list[ShardedTensor] = []
    for out, tensor, handle in zip(plan.outputs, here, remote, strict=True):
        if isinstance(out, rules.Rows):
            outputs.append(ShardedTensor.of_rows(team, tensor, handle, out.dim, out.rows))
        else:
            assert out is not None  # noqa: S101
            outputs.append(ShardedTensor.of_parts(Parts(team, tensor, handle, replicas, out.combine, out.weights)))
    for out, made in zip(plan.outputs, outputs, strict=True):
        if isinstance(out, rules.Parts) and out.over is not None:
            cast("Parts", made.parts).over = outputs[out.over].parts
    if plan.view:
        outputs = _views(plan, call, outputs)
    return outputs[0] if isinstance(result, Tensor) else type(result)(outputs)


def _views(plan: rules.Plan, call: rules.Call, outputs: list[ShardedTensor]) -> list[ShardedTensor]:
    """Give views the geometry of views of the whole, as autograd expects it, and tie them to their base."""
    base = cast("ShardedTensor", call.args[0])
    stand_in = torch.empty(0, dtype=base.dtype, device="meta")
    stand_in = stand_in.set_(
        torch.UntypedStorage(_extent_bytes(base), device="meta"), base.storage_offset(), base.shape, base.stride()
    )

    def whole(tensor: Tensor) -> Any:
        return call.function(tensor, *call.args[1:], **call.kwargs)

    found = whole(stand_in)
    geometries: list[Tensor] = [found] if isinstance(found, Tensor) else list(found)
    made: list[ShardedTensor] = []
    for position, (output, geometry) in enumerate(zip(outputs, geometries, strict=True)):
        view = ShardedTensor(
            cast("Shards", output._content), geometry.shape, geometry.stride(), int(geometry.storage_offset())
        )

        def again(tensor: Tensor, position: int = position) -> Tensor:
            result = whole(tensor)
            return result if isinstance(result, Tensor) else result[position]

        made.append(view._become_view(base, again))
    return made


def _extent_bytes(tensor: Tensor) -> int:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _shards(tensor: Tensor) -> Shards | None:
    return tensor.shards if isinstance(tensor, ShardedTensor) else None


def _operand(value: Tensor | rules.Cut, team: Team, replicas: int) -> tuple[Tensor, Handle]:
    """An operand here, and in the replicas, where it is put unless it is there already."""
    if isinstance(value, rules.Cut):
        return _scattered(value.tensor, value.dim, value.rows, team)
    shards = _shards(value)
    if shards is not None:
        return shards.local, shards.handle
    return value, values.put(team, [value] * (replicas - 1))


_Scattered = tuple["weakref.ref[Tensor]", Tensor, "Handle"]
_scattered_cache: dict[tuple[Any, ...], _Scattered] = {}


def _scattered(tensor: Tensor, dim: int, rows: tuple[int, ...], team: Team) -> tuple[Tensor, Handle]:
    """A plain tensor's rows here and in the replicas. Remembered: a loss and its gradient use the same targets."""
    if tensor.is_inference():
        pieces = tensor.split(rows, dim)
        return pieces[0], values.put(team, pieces[1:])
    key = (id(tensor), tensor._version, tensor.data_ptr(), dim, rows, id(team), team.generation)
    found = _scattered_cache.get(key)
    if found is not None and found[0]() is tensor:
        return found[1], found[2]
    # Not views of the tensor object itself: their base would keep it, and so this entry, alive for ever.
    pieces = tensor.data.split(rows, dim)
    handle = values.put(team, pieces[1:])

    def forget(_: object) -> None:
        _scattered_cache.pop(key, None)

    _scattered_cache[key] = (weakref.ref(tensor, forget), pieces[0], handle)
    return pieces[0], handle


def _run_gathered(func: rules.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation as PyTorch does, on whole tensors.

    Tensors that it writes to, or returns a view of, are brought here for good: a copy would not see the writes.
    """
    schema = func._schema  # pyright: ignore[reportPrivateUsage]
    aliased = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    size = 0

    def whole(value: Any, settle: bool) -> Any:
        nonlocal size
        if isinstance(value, ShardedTensor):
            if func in _EMPTY_LIKE and value.parts is not None:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if value.shards is not None:
                size += value.numel() * value.element_size()
            return value.settle() if settle else value.plain()
        return value

    names = [argument.name for argument in schema.arguments]
    whole_args = tuple(_mapped(arg, whole, names[i] in aliased) for i, arg in enumerate(args))
    whole_kwargs = {name: _mapped(value, whole, name in aliased) for name, value in kwargs.items()}
    if size:
        _note_gathering(func.name(), size)
    result = func(*whole_args, **whole_kwargs)
    if schema.is_mutable:
        for given, used in zip([*args, *kwargs.values()], [*whole_args, *whole_kwargs.values()], strict=True):
            if result is used:
                return given
    return result


def _note_gathering(name: str, size: int) -> None:
    gathered[name] += 1
    if size > LARGE_BYTES and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} works on whole tensors: {size / 2**20:.1f} MiB were gathered on the first device for it "
            "(said once per operation)",
            stacklevel=2,
        )


# ---------------------------------------------------------------------- geometry


def whole_geometry(local: Tensor, dim: int, rows: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shape and strides of the whole tensor of which ``local`` is the first replica's part along ``dim``."""
    total = sum(rows)
    shape = list(local.shape)
    shape[dim] = total
    stride = list(local.stride())
    mine, step = local.shape[dim], stride[dim]
    if mine == total or step == 0:
        return shape, stride
    # Dimensions that lie further out than the rows move apart as the rows get more.
    return shape, [s // mine * total if s >= step * mine and s % mine == 0 and mine > 1 else s for s in stride] if (
        mine > 1
    ) else _dense_like(shape, stride, dim)


def _dense_like(shape: Sequence[int], stride: Sequence[int], dim: int) -> list[int]:
    """Dense strides in the order of ``stride``. With one row its own stride tells nothing: ties keep the order."""
    order = sorted(range(len(shape)), key=lambda d: (stride[d], -d))
    result = [0] * len(shape)
    step = 1
    for d in order:
        result[d] = step
        step *= max(shape[d], 1)
    return result


def _dense(shape: Sequence[int]) -> list[int]:
    return _dense_like(shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))], 0)
