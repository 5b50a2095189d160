"""Noticing what changed on a module between two calls, cheaply enough to look every time.

When nothing changed, looking is a few passes of C loops (`map`, `chain`, `all`) over dictionaries that were
collected beforehand: no line of Python runs for a module unless something differs, or its attributes hold
tensors.
"""

from __future__ import annotations

import array
import ctypes
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any, cast

from torch import Tensor, nn

from evenly.snapshot import Snapshot, Snapshots, matches
from evenly.team.definitions import is_parametrized
from evenly.team.namespaces import DELETED

__all__ = ["DELETED", "Changes", "Identities", "Watch"]


@dataclass
class Changes:
    """What differs from the baseline.

    Attributes:
        structure: Modules, their classes, parameters, hooks or the names of buffers changed: the module must
            be sent again as a whole. Nothing else is filled in then.
        attributes: Other attributes that were set, changed in place or deleted: (index of the module in
            ``list(module.modules())``, name, the present value or ``DELETED``).
        training: The ``training`` flag of every module, if any differs.
        requires_grad: (index of the leaf, its flag) for each flag that differs.
        surroundings: What changed outside of the module, see :mod:`evenly.surroundings`.
    """

    structure: bool = False
    attributes: list[tuple[int, str, object]] = field(default_factory=list[tuple[int, str, object]])
    training: list[bool] | None = None
    requires_grad: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    surroundings: list[Any] = field(default_factory=list[Any])

    def __bool__(self) -> bool:
        return self.structure or bool(self.attributes or self.training or self.requires_grad or self.surroundings)

    def apply(self, modules: Sequence[nn.Module], leaves: Sequence[Tensor]) -> None:
        """Makes the same changes to a copy of the module, all but those of structure."""
        for index, name, value in self.attributes:
            if value is DELETED:
                vars(modules[index]).pop(name, None)
            else:
                vars(modules[index])[name] = value
        if self.training is not None:
            for module, training in zip(modules, self.training, strict=True):
                module.training = training
        for index, flag in self.requires_grad:
            leaves[index].requires_grad_(flag)
        for setting in self.surroundings:
            setting.apply()


_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
# Of no consequence to forward, or remade by each process for itself.
_IGNORED = {"_non_persistent_buffers_set", "_compiled_call_impl", "_flat_weight_refs"}
_HEAVY = object()  # stands for an attribute whose value must not be kept alive


class Watch:
    """Compares a module with how it was.

    There are two baselines. *Structure* is compared with what was last sent: :meth:`rebase`. *Attributes* are
    compared with the state after the last forward, :meth:`rebase_attributes`, because what ``forward`` sets
    on ``self`` stays in each replica for itself. Values of parameters and buffers are not looked at; a buffer
    may be bound to another tensor of the same shape, dtype and device.

    What code reads from outside of the module is for :class:`evenly.surroundings.Surroundings`. Not noticed: what
    exceeds the bounds of :mod:`evenly.snapshot`.

    Args:
        module: What to watch.
        leaves: The leaf tensors whose storage and ``requires_grad`` matter, in an order that the caller
            knows; by default the module's parameters.
    """

    def __init__(self, module: nn.Module, leaves: Collection[Tensor] | None = None) -> None:
        self._module = module
        self._given_leaves = leaves
        self.rebase()

    def rebase(self) -> None:
        """Takes the present state as the new baseline: structure, attributes and leaves."""
        modules = self._modules = list(self._module.modules())
        self._types = list(map(type, modules))
        self._dicts = list(map(vars, modules))
        tables = [state[name] for state in self._dicts for name in _TABLES if isinstance(state.get(name), dict)]
        self._empty_tables: list[dict[Any, Any]] = [table for table in tables if not table]
        buffers = [state["_buffers"] for state in self._dicts if state.get("_buffers")]
        bound_freely = set(map(id, buffers))
        self._tables: list[dict[Any, Any]] = [t for t in tables if t and id(t) not in bound_freely]
        self._table_keys = _keys(self._tables)
        self._table_values = Identities(_values(self._tables))
        self._buffers: list[dict[str, Tensor | None]] = buffers
        self._buffer_keys = _keys(buffers)
        self._buffer_values: list[Tensor | None] = list(_values(buffers))
        self._buffer_kinds = list(map(_kind, self._buffer_values))
        self._rebase_leaves(list(self._module.parameters() if self._given_leaves is None else self._given_leaves))
        snapshots = Snapshots()
        self._records = [_Record(state, snapshots) for state in self._dicts]
        self._collect()

    def rebase_attributes(self) -> None:
        """Takes the present attributes, ``training`` and ``requires_grad`` flags as the new baseline."""
        self._requires_grad = list(map(_requires_grad, self._leaves))
        buffers = list(_values(self._buffers))
        if not all(map(is_, buffers, self._buffer_values)) and list(map(_kind, buffers)) == self._buffer_kinds:
            self._buffer_values = buffers
        if self._attributes_hold():
            return
        snapshots = Snapshots()
        for index, (record, state) in enumerate(zip(self._records, self._dicts, strict=True)):
            if not record.holds(state):
                self._records[index] = _Record(state, snapshots)
        self._collect()

    def changes(self) -> Changes:
        """Compares the module with the baseline, which stays as it is."""
        if not self._structure_holds():
            return Changes(structure=True)
        changes = Changes()
        flags = list(map(_requires_grad, self._leaves))
        if flags != self._requires_grad:
            both = zip(flags, self._requires_grad, strict=True)
            changes.requires_grad = [(index, new) for index, (new, old) in enumerate(both) if new != old]
        if not self._attributes_hold():
            self._find_attributes(changes)
        return Changes(structure=True) if changes.structure else changes

    def _structure_holds(self) -> bool:
        return (
            list(map(type, self._modules)) == self._types
            and all(map(is_, map(vars, self._modules), self._dicts))
            and not any(self._empty_tables)
            and _keys(self._tables) == self._table_keys
            and self._table_values.are_those_of(_values(self._tables))
            and _keys(self._buffers) == self._buffer_keys
            and (
                all(map(is_, _values(self._buffers), self._buffer_values))
                or list(map(_kind, _values(self._buffers))) == self._buffer_kinds
            )
            and self._leaves_hold()
        )

    def _rebase_leaves(self, leaves: list[Tensor]) -> None:
        self._leaves = leaves
        self._requires_grad = list(map(_requires_grad, leaves))
        self._dense = [leaf for leaf in leaves if _has_memory(leaf)]
        self._others = [leaf for leaf in leaves if not _has_memory(leaf)]
        self._other_types = list(map(type, self._others))  # a lazy parameter changes its class
        self._pointers = list(map(Tensor.data_ptr, self._dense))
        self._sizes = list(map(Tensor.size, self._dense))
        self._strides = list(map(Tensor.stride, self._dense))
        self._dtypes = list(map(_dtype, self._dense))

    def _leaves_hold(self) -> bool:
        dense = self._dense
        return (
            list(map(Tensor.data_ptr, dense)) == self._pointers
            and list(map(Tensor.size, dense)) == self._sizes
            and list(map(Tensor.stride, dense)) == self._strides
            and list(map(_dtype, dense)) == self._dtypes
            and list(map(type, self._others)) == self._other_types
        )

    def _collect(self) -> None:
        """Lays the records of all modules end to end."""
        both = list(zip(self._records, self._dicts, strict=True))
        self._light = [state for record, state in both if not record.heavy]
        self._light_keys = [name for record, _ in both if not record.heavy for name in record.names]
        self._light_values = Identities(value for record, _ in both if not record.heavy for value in record.values)
        self._heavy = [(record, state) for record, state in both if record.heavy]
        snapshots = [snapshot for record, _ in both if not record.heavy for snapshot in record.snapshots]
        self._mutable = list({id(snapshot): snapshot for snapshot in snapshots}.values())

    def _attributes_hold(self) -> bool:
        return (
            _keys(self._light) == self._light_keys
            and self._light_values.are_those_of(_values(self._light))
            and all(snapshot.matches(snapshot.kept) for snapshot in self._mutable)
            and all(record.holds(state) for record, state in self._heavy)
        )

    def _find_attributes(self, changes: Changes) -> None:
        retrained = False
        for index, (record, state) in enumerate(zip(self._records, self._dicts, strict=True)):
            for name, value in record.differences(state):
                if name == "training":
                    retrained = True
                elif name in _TABLES or _says_what_travels(self._types[index]):
                    changes.structure = True
                else:
                    changes.attributes.append((index, name, value))
        if retrained:
            changes.training = [module.training for module in self._modules]


class _Record:
    """The attributes of one module, as they were."""

    __slots__ = ("heavy", "names", "saved", "snapshots", "values")

    def __init__(self, state: dict[str, Any], snapshots: Snapshots) -> None:
        self.names = list(state)
        self.saved = {
            name: value if name in _TABLES or name in _IGNORED else snapshots.take(value)
            for name, value in state.items()
        }
        self.snapshots = [saved for saved in self.saved.values() if isinstance(saved, Snapshot)]
        self.values = [
            (_HEAVY if saved.kept is None else saved.kept) if isinstance(saved, Snapshot) else saved
            for saved in self.saved.values()
        ]
        self.heavy = any(value is _HEAVY for value in self.values)

    def holds(self, state: dict[str, Any]) -> bool:
        """Whether all is the same; may say no where :meth:`differences` finds none."""
        return (
            list(state) == self.names
            and all(old is _HEAVY or new is old for new, old in zip(state.values(), self.values, strict=True))
            and all(saved.matches(state[name]) for name, saved in self.saved.items() if isinstance(saved, Snapshot))
        )

    def differences(self, state: dict[str, Any]) -> list[tuple[str, Any]]:
        """Name and present value, or DELETED, of what differs."""
        saved = self.saved
        found = [
            (name, value)
            for name, value in state.items()
            if (name not in saved or not matches(value, saved[name])) and name not in _IGNORED
        ]
        return found + [(name, DELETED) for name in saved if name not in state and name not in _IGNORED]


class Identities:
    """Which objects some were, all at once: comparing them one by one takes four times as long.

    Args:
        values: The objects, which are kept alive.
    """

    __slots__ = ("_addresses", "_values")

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)
        self._addresses = _addresses(self._values)

    def are_those_of(self, values: Iterable[Any]) -> bool:
        """Whether ``values`` are the same objects in the same order."""
        return _addresses(tuple(values)) == self._addresses


def _addresses(values: tuple[Any, ...]) -> bytes:
    if _TUPLES_HOLD_ADDRESSES:
        return ctypes.string_at(id(values) + tuple.__basicsize__, len(values) * _ADDRESS_BYTES)
    return array.array("Q", map(id, values)).tobytes()


_ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)


def _tuples_hold_addresses() -> bool:
    """Whether a tuple's memory is what CPython's source says, tried out on one."""
    if sys.implementation.name != "cpython" or tuple.__itemsize__ != _ADDRESS_BYTES:
        return False
    values: tuple[object, ...] = (None, 1.5, "x", _addresses)
    found = ctypes.string_at(id(values) + tuple.__basicsize__, len(values) * _ADDRESS_BYTES)
    return found == array.array("Q", map(id, values)).tobytes()


_TUPLES_HOLD_ADDRESSES = _tuples_hold_addresses()


def _says_what_travels(cls: type[nn.Module]) -> bool:
    """Whether the class has a ``__getstate__`` of its own: only a whole parcel asks it."""
    if is_parametrized(cls):
        cls = cls.__mro__[1]
    return cls.__getstate__ is not nn.Module.__getstate__


def _keys(tables: list[Any]) -> list[Any]:
    return list(chain.from_iterable(tables))


def _values(tables: list[Any]) -> Iterable[Any]:
    return chain.from_iterable(map(_values_of, tables))


_values_of = cast("Callable[[Any], Iterable[Any]]", dict.values)  # pyright: ignore[reportUnknownMemberType]
_requires_grad = attrgetter("requires_grad")
_dtype = attrgetter("dtype")


def _kind(buffer: Tensor | None) -> tuple[Any, ...] | None:
    return None if buffer is None else (buffer.shape, buffer.dtype, buffer.device)


def _has_memory(leaf: Tensor) -> bool:
    """Whether a leaf lies somewhere with strides; a lazy, sparse or wrapped one does not."""
    try:
        _ = leaf.data_ptr(), leaf.size(), leaf.stride()
    except Exception:
        return False
    return True
