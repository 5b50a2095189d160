"""What a Python value looked like, to tell later whether it was changed in place.

Containers and objects with a ``__dict__`` are followed; what they hold is compared by identity, and numbers
and strings by value too. A tensor counts as changed when it is another one, or its version counter moved;
parameters and leaves that require grad only when they are others, because their values are shared anyhow.

Bounds: what lies deeper than 5 levels, containers of more than 1,000 entries, and whatever comes after the
first 2,000 entries of one value are compared by identity and length only. Arrays outside torch are compared
by content up to 64 KiB, beyond that by identity. Functions, modules and classes are not looked into.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, cast

from torch import Tensor, nn

__all__ = ["Snapshot", "Snapshots", "matches"]

_DEEPEST = 5
_LARGEST = 1_000
_MOST_ENTRIES = 2_000  # some 0.2 ms each time a value is compared
_LARGEST_ARRAY = 1 << 16  # bytes

_ATOMS = (int, float, complex, bool, str, bytes, type(None))
_OPAQUE: tuple[type, ...] = (
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    weakref.ref,
)


class Snapshot:
    """How one mutable value looked.

    Attributes:
        kept: The value itself, so that its identity says something. None if a tensor is in it: keeping it
            alive would keep memory, and perhaps the graph of a whole forward.
    """

    __slots__ = ("_id", "kept")

    def __init__(self, value: object, *, keep: bool) -> None:
        self._id = id(value)
        self.kept = value if keep else None

    def matches(self, value: object) -> bool:
        """Whether `value` is the same object and looks the same."""
        return id(value) == self._id and self._looks(value)

    def _looks(self, value: Any) -> bool:
        raise NotImplementedError


def matches(value: object, saved: object) -> bool:
    """Whether `value` is what `saved` (itself, or its snapshot) was taken of."""
    if isinstance(saved, Snapshot):
        return saved.matches(value)
    return value is saved or (type(value) is type(saved) and isinstance(saved, _ATOMS) and value == saved)


class Snapshots:
    """Takes snapshots; an object that is met twice is looked at once."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[object, object]] = {}  # id -> (the object, so that it lives; what was taken)
        self._entries = 0

    def take(self, value: object) -> object:
        """Returns a :class:`Snapshot` of a mutable value, and any other value itself."""
        self._entries = 0
        return self._take(value, 0)

    def _take(self, value: object, depth: int) -> object:
        if isinstance(value, _ATOMS) or isinstance(value, _OPAQUE):  # noqa: SIM101 - hot, and this is faster
            return cast("object", value)
        if id(value) not in self._taken:
            self._taken[id(value)] = value, value  # what contains itself is followed once
            self._taken[id(value)] = value, self._look_at(value, depth)
        return self._taken[id(value)][1]

    def _look_at(self, value: object, depth: int) -> object:
        if isinstance(value, Tensor):
            is_leaf = isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf)
            return value if is_leaf else _TensorSnapshot(value)
        if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            return self._look_into(cast("Any", value), depth)
        if isinstance(value, bytearray) or hasattr(value, "__array_interface__"):
            return _ArraySnapshot(value)
        attributes = getattr(value, "__dict__", None)
        if attributes is None or depth >= _DEEPEST:
            return value
        return _ObjectSnapshot(value, self._take(attributes, depth + 1))

    def _look_into(self, value: Any, depth: int) -> object:
        self._entries += len(value)
        if depth >= _DEEPEST or len(value) > _LARGEST or self._entries > _MOST_ENTRIES:
            return _LargeSnapshot(value)
        parts = [self._take(part, depth + 1) for part in _parts(value)]
        attributes = getattr(value, "__dict__", None)  # of a subclass
        if attributes:
            parts.append(self._take(attributes, depth + 1))
        elif isinstance(value, (tuple, frozenset)) and not _any_snapshot(parts):
            return cast("object", value)
        return _ContainerSnapshot(value, parts)


def _parts(value: Any) -> Iterable[object]:
    return cast("Mapping[object, object]", value).values() if isinstance(value, Mapping) else value


def _any_snapshot(parts: Iterable[object]) -> bool:
    return any(isinstance(part, Snapshot) for part in parts)


def _may_be_kept(part: object) -> bool:
    return not isinstance(part, Snapshot) or part.kept is not None


class _TensorSnapshot(Snapshot):
    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor, keep=False)
        self._tensor = weakref.ref(tensor)  # an id is used again once its object is gone
        self._version = _version(tensor)

    def _looks(self, value: Any) -> bool:
        return value is self._tensor() and _version(value) == self._version


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _ContainerSnapshot(Snapshot):
    """Entries in their order; for a mapping the keys too; the ``__dict__`` of a subclass comes last."""

    __slots__ = ("_flat", "_keys", "_parts", "_size")

    def __init__(self, value: Any, parts: list[object]) -> None:
        super().__init__(value, keep=all(map(_may_be_kept, parts)))
        self._size = len(value)
        self._keys = [*cast("Mapping[object, object]", value)] if isinstance(value, Mapping) else None
        self._parts = parts
        self._flat = not _any_snapshot(parts)

    def _looks(self, value: Any) -> bool:
        if len(value) != self._size:
            return False
        if self._keys is not None and not all(map(is_, value, self._keys)):
            return False
        if self._flat and all(map(is_, _parts(value), self._parts)):
            return True
        if len(self._parts) > self._size and not matches(value.__dict__, self._parts[-1]):
            return False
        return all(map(matches, _parts(value), self._parts))


class _ObjectSnapshot(Snapshot):
    __slots__ = ("_attributes",)

    def __init__(self, value: object, attributes: object) -> None:
        super().__init__(value, keep=_may_be_kept(attributes))
        self._attributes = attributes

    def _looks(self, value: Any) -> bool:
        return matches(value.__dict__, self._attributes)


class _ArraySnapshot(Snapshot):
    __slots__ = ("_content",)

    def __init__(self, value: object) -> None:
        super().__init__(value, keep=True)
        self._content = _content(value)

    def _looks(self, value: Any) -> bool:
        return _content(value) == self._content


def _content(array: Any) -> object:
    if isinstance(array, bytearray):
        return bytes(array) if len(array) <= _LARGEST_ARRAY else len(array)
    return array.shape, str(array.dtype), array.tobytes() if array.nbytes <= _LARGEST_ARRAY else None


class _LargeSnapshot(Snapshot):
    __slots__ = ("_size",)

    def __init__(self, value: Any) -> None:
        super().__init__(value, keep=False)
        self._size = len(value)

    def _looks(self, value: Any) -> bool:
        return len(value) == self._size
