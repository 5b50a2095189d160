"""A Python object by value to another process: a module, the arguments of a call, a hook.

An object travels as a :class:`Parcel`: a pickle of its skeleton, and beside it the tensors that it holds.
Three kinds of things are not in the pickle but referred to by position:

- *leaf tensors* (parameters, and whatever else requires grad): the receiver puts its own in their place, so
  that storage can be shared, tied weights stay tied, and the optimizer's objects remain the only ones;
- *other dense tensors*: they follow in :attr:`Parcel.tensors`, for the wire to move as it likes;
- *modules the receiver already has*, when only a change is sent.

Classes and functions travel by value when another process could not import them, with their true file names
and line numbers. A class that comes back to the process that defined it is that process's own class again.
"""

from __future__ import annotations

import io
import pickle
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor, nn

from evenly.team.compiled import reduce_compiled, reduce_scripted
from evenly.team.definitions import (
    is_parametrized,
    reduce_class,
    reduce_code,
    reduce_parametrized,
    reduce_python_module,
)
from evenly.team.importable import register_if_by_value
from evenly.team.namespaces import ModuleVariables, make_function, namespace_of

__all__ = ["ByValue", "LeafRegistry", "Parcel", "ShippingError", "pack", "unpack"]


class ShippingError(TypeError):
    """An object cannot be sent to another process.

    The message names the attribute path, its type, the cause and the remedy.
    """


@dataclass
class Parcel:
    """An object on its way.

    Attributes:
        payload: A pickle of everything but dense tensors and leaves.
        tensors: Dense strided tensors without grad, each compact in memory, on the device where they were
            found. The receiver hands tensors with the same values (on its own device) to :func:`unpack`.
    """

    payload: bytes
    tensors: list[Tensor] = field(default_factory=list[Tensor])


@dataclass(frozen=True)
class ByValue:
    """A function that is to travel by value, whatever its name leads to elsewhere.

    Attributes:
        function: The function, which the receiver gets in place of this.
        module: Name of the importable module whose variables it reads; None if a copy of them is to travel along.
    """

    function: types.FunctionType
    module: str | None


class LeafRegistry:
    """Leaf tensors by identity, in the order in which they came; both sides speak of them by index.

    Holds the tensors, so an index stays valid as long as the registry lives.

    Args:
        tensors: The first ones, e.g. ``module.parameters()``.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}
        for tensor in tensors:
            self.index(tensor)

    def index(self, tensor: Tensor) -> int:
        """The index of `tensor`, which is entered if it is new."""
        index = self._indices.setdefault(id(tensor), len(self._tensors))
        if index == len(self._tensors):
            self._tensors.append(tensor)
        return index

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self._tensors[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._indices


def pack(
    obj: object,
    *,
    leaves: LeafRegistry | None = None,
    known_modules: Mapping[int, int] | None = None,
    homeward: bool = False,
    name: str = "object",
) -> Parcel:
    """Makes a parcel of `obj`.

    Args:
        obj: Any Python object.
        leaves: Where leaf tensors (those that require grad, and every ``nn.Parameter``) are entered; they are
            not in the parcel. Without it they travel as values, and are new leaves on arrival.
        known_modules: ``id(module) -> index`` of modules that the receiver has and passes to :func:`unpack`.
        homeward: Whether the receiver is the process that every class received here came from: a replica's
            driver. Such classes are then only named, and the receiver takes its own.
        name: What the user calls `obj`; the root of paths in error messages.

    Raises:
        ShippingError: If something in `obj` cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, leaves, known_modules, homeward=homeward)
    try:
        pickler.dump(obj)
    except Exception as error:
        from evenly.team.obstacle import explain_obstacle  # only on failure, and it packs in turn

        message = explain_obstacle(obj, name, error, lambda part: _try_pack(part, known_modules))
        raise ShippingError(message) from error
    return Parcel(file.getvalue(), pickler.tensors)


def unpack(
    payload: bytes,
    tensors: Sequence[Tensor] = (),
    leaves: Sequence[Tensor] | LeafRegistry = (),
    modules: Sequence[nn.Module] = (),
) -> Any:
    """Rebuilds what :func:`pack` packed.

    Args:
        payload: :attr:`Parcel.payload`.
        tensors: This process's counterparts of :attr:`Parcel.tensors`; used as they are, uncopied.
        leaves: This process's leaf tensors, in the order of the sender's registry.
        modules: The modules that the sender's `known_modules` counts.

    Raises:
        Exception: Whatever importing or rebuilding a part raises.
    """
    return _Unpickler(io.BytesIO(payload), tensors, leaves, modules).load()


def _try_pack(obj: object, known_modules: Mapping[int, int] | None) -> None:
    _Pickler(io.BytesIO(), LeafRegistry(), known_modules, homeward=False).dump(obj)


# A persistent id is `4 * index + kind`: one small int, because pickle asks about every part of an id again.

_TENSOR, _LEAF, _MODULE, _OTHER = range(4)

# What the type of an object says about it; the commonest types are known from the start.
_COMMON_TYPES: dict[type, int] = {
    Tensor: _TENSOR,
    nn.Parameter: _TENSOR,
    **dict.fromkeys((str, int, float, bool, bytes, type(None), tuple, list, dict, set, type), _OTHER),
}


class _Placed:
    """Stands for something that has a persistent id, inside the reduction of that very thing."""

    __slots__ = ("pid",)

    def __init__(self, pid: int) -> None:
        self.pid = pid


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        leaves: LeafRegistry | None,
        known_modules: Mapping[int, int] | None,
        *,
        homeward: bool,
    ) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._leaves = leaves
        self._known_modules = known_modules
        self._homeward = homeward
        self._kinds = _COMMON_TYPES.copy()
        self._places: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def persistent_id(self, obj: object) -> int | None:
        cls = type(obj)
        kind = self._kinds.get(cls)
        if kind is None:
            kind = self._kinds[cls] = _kind_of(cls)
        if kind == _OTHER:
            return None
        if kind == _TENSOR:
            return None if obj.__dict__ else self._tensor_id(cast("Tensor", obj))
        if kind == _MODULE:
            index = self._known_modules.get(id(obj)) if self._known_modules else None
            return None if index is None else 4 * index + _MODULE
        return cast("_Placed", obj).pid

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)  # pyright: ignore[reportUnknownVariableType]
        if cls is types.FunctionType:
            register_if_by_value(obj.__module__)
            return reduce_compiled(obj) or super().reducer_override(obj)
        if cls is ByValue:
            return self._reduce_by_value(obj)
        if cls is torch.jit.ScriptFunction:
            return reduce_scripted(obj)
        if cls is types.CodeType:
            return reduce_code(obj)
        if issubclass(cls, type):
            return reduce_class(obj, super().reducer_override, homeward=self._homeward)
        if issubclass(cls, Tensor):
            return self._reduce_tensor(obj)
        if issubclass(cls, types.ModuleType):
            return reduce_python_module(obj)
        if cls is weakref.ref:
            referent = obj()
            return (_dead_reference, ()) if referent is None else (weakref.ref, (referent,))
        if issubclass(cls, nn.Module) and is_parametrized(cls):
            return reduce_parametrized(obj)
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        reduction: Any = cast("Any", super())._dynamic_function_reduce(func)
        if self._homeward:
            return reduction
        return make_function, (namespace_of(func), *reduction[:2]), *reduction[2:]

    def _reduce_by_value(self, given: ByValue) -> Any:
        function: Any = given.function
        if given.module is None:
            return self._dynamic_function_reduce(function)
        make, (namespace, make_inner, args), state, *rest = self._dynamic_function_reduce(function)
        attributes, slots = state
        args = (args[0], ModuleVariables(given.module), *args[2:])
        return make, (namespace, make_inner, args), (attributes, {**slots, "__globals__": {}}), *rest

    def _tensor_id(self, tensor: Tensor) -> int | None:
        """The persistent id of a tensor without Python attributes; None if torch has to take it apart."""
        place = self._places.get(id(tensor))
        if place is not None:
            return place
        if _is_leaf(tensor):
            return None if self._leaves is None else 4 * self._leaves.index(tensor) + _LEAF
        if not _is_plain(tensor):
            return None
        # Kept, so that no id in _places is used twice.
        self._alive.append(tensor)
        place = self._follow(tensor)
        self._places[id(tensor)] = place
        return place

    def _follow(self, tensor: Tensor) -> int:
        """Lets `tensor` follow in the parcel; returns its persistent id."""
        self.tensors.append(_compact(tensor))
        return 4 * (len(self.tensors) - 1) + _TENSOR

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        """A tensor that is more than its place: exotic, with Python attributes, or a leaf that travels."""
        cls, state = type(tensor), tensor.__dict__ or None
        is_leaf = _is_leaf(tensor)
        if is_leaf and self._leaves is not None:
            place = _Placed(4 * self._leaves.index(tensor) + _LEAF)
        elif _is_plain(tensor) and cls in (Tensor, nn.Parameter):
            place = _Placed(self._follow(tensor))
        else:
            return NotImplemented
        build: Callable[..., Tensor] = _same
        if is_leaf and self._leaves is None:
            build = _parameter if cls is nn.Parameter else _leaf
            return build, (place, tensor.requires_grad), state, None, None, _set_attributes
        return build, (place,), state, None, None, _set_attributes


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        tensors: Sequence[Tensor],
        leaves: Sequence[Tensor] | LeafRegistry,
        modules: Sequence[nn.Module],
    ) -> None:
        super().__init__(file)
        self._things = (tensors, leaves, modules)

    def persistent_load(self, pid: int) -> Any:
        return self._things[pid & 3][pid >> 2]


def _kind_of(cls: type) -> int:
    if issubclass(cls, nn.Module):
        return _MODULE
    if cls is _Placed:
        return _LEAF
    # A subclass that is not a parameter knows best how to rebuild itself; its parts come back here.
    return _TENSOR if issubclass(cls, nn.Parameter) else _OTHER


def _is_leaf(tensor: Tensor) -> bool:
    return (tensor.requires_grad and tensor.is_leaf) or isinstance(tensor, nn.Parameter)


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape, strides and values are all there is to it."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def _compact(tensor: Tensor) -> Tensor:
    """`tensor` without grad and with each of its elements once in memory."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()):
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or _fills_its_memory(tensor):
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether a permutation of the dimensions makes it contiguous, as with channels_last."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _leaf(values: Tensor, requires_grad: bool) -> Tensor:
    return values.detach().requires_grad_(requires_grad)


def _parameter(values: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(values, requires_grad)


def _set_attributes(obj: object, attributes: dict[str, Any]) -> None:
    obj.__dict__.update(attributes)


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(_Placed(0))
