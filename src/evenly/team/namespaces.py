"""The surroundings of user code in another process: variables of its modules, entries of its classes, closures.

[Note: by value or by name] What can be imported is imported by each process for itself; what the user's program
changed afterwards must be set there in the module of that name. Functions that travel by value bring along a copy
of the globals that they read: one per parcel, found again by the functions that were made of it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Final, cast

from torch import Tensor

from evenly.team.definitions import class_of_key

__all__ = ["DELETED", "Attribute", "Cell", "ModuleVariables", "Variable", "make_function", "namespace_of", "unwrap"]


class _Deleted(Enum):
    DELETED = "deleted"


DELETED: Final = _Deleted.DELETED

# which namespace of the sender -> the functions here that were made with a copy of it
_functions: dict[int, weakref.WeakSet[types.FunctionType]] = {}
_namespaces: weakref.WeakKeyDictionary[types.FunctionType, int] = weakref.WeakKeyDictionary()


def make_function(namespace: int, make: Callable[..., types.FunctionType], args: tuple[Any, ...]) -> Any:
    """Makes a function that came by value, and notes whose globals it has a copy of."""
    function = make(*args)
    _functions.setdefault(namespace, weakref.WeakSet()).add(function)
    _namespaces[function] = namespace
    return function


def namespace_of(function: types.FunctionType) -> int:
    """What all processes call the namespace that the function reads its globals from."""
    return _namespaces.get(function, id(function.__globals__))


@dataclass(frozen=True)
class Variable:
    """A global variable.

    Attributes:
        namespace: ``id`` of the namespace in the sender.
        module: Name under which a receiver imports its module; None if it cannot.
        title: What the user calls the module.
        name: The variable.
    """

    namespace: int
    module: str | None
    title: str
    name: str

    def set(self, value: object, *, in_place: bool) -> None:
        """Gives the variable its value wherever it is."""
        found = {id(function.__globals__): function.__globals__ for function in _functions.get(self.namespace, ())}
        if self.module is not None:
            namespace = vars(importlib.import_module(self.module))
            found[id(namespace)] = namespace
        for namespace in found.values():
            if value is DELETED:
                namespace.pop(self.name, None)
            elif not (in_place and _overwrite(namespace.get(self.name), value)):
                namespace[self.name] = value

    def __str__(self) -> str:
        return f"the variable {self.name!r} of module {self.title!r}"


@dataclass(frozen=True)
class Attribute:
    """An entry of a class.

    Attributes:
        home: Module and qualified name by which a receiver imports the class, or the key under which it received it.
        title: What the user calls the class.
        name: The attribute.
    """

    home: tuple[str, str] | str
    title: str
    name: str

    def set(self, value: object, *, in_place: bool) -> None:
        """Gives the attribute its value."""
        cls = class_of_key(self.home) if isinstance(self.home, str) else _imported(*self.home)
        if cls is None:
            return  # it came with something that has been dropped since
        if value is not DELETED:
            if not (in_place and _overwrite(vars(cls).get(self.name), value)):
                setattr(cls, self.name, value)
        elif self.name in vars(cls):
            delattr(cls, self.name)

    def __str__(self) -> str:
        return f"the attribute {self.name!r} of class {self.title}"


@dataclass(frozen=True)
class Cell:
    """A variable in the closure of a function that can be imported.

    Attributes:
        root: The variable or attribute where the function is found.
        path: Which of the function's closure variables; of the function that is its value, and so on.
        name: The variable.
    """

    root: Variable | Attribute
    path: tuple[int, ...]
    name: str

    def set(self, value: object, *, in_place: bool) -> None:
        """Gives the variable its value."""
        root = self.root
        if isinstance(root, Variable):
            found: Any = vars(importlib.import_module(cast("str", root.module)))[root.name]
        else:
            found = cast("Any", vars(_imported(*root.home))[root.name])
        for index in self.path[:-1]:
            found = unwrap(found).__closure__[index].cell_contents
        cell = unwrap(found).__closure__[self.path[-1]]
        if not (in_place and _overwrite(cell.cell_contents, value)):
            cell.cell_contents = value

    def __str__(self) -> str:
        return f"the variable {self.name!r} in the closure of {self.root.name!r}"


class ModuleVariables:
    """Stands for the variables of an importable module in a parcel."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _variables_of, (self._name,)


def unwrap(value: Any) -> Any:
    """The function in a method, property or partial function; any other value itself."""
    while True:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = cast("Any", value).__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, (functools.partial, functools.cached_property)):
            value = cast("Any", value).func
        else:
            return value


def _variables_of(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))


def _imported(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = inspect.getattr_static(found, part)
    return found


def _is_same(one: Any, other: Any) -> bool:
    """Whether two containers of numbers and strings hold the same."""
    kind = cast("Any", type(one))
    if kind is not type(other):
        return False
    if kind is dict:
        return [*one] == [*other] and all(map(_is_same, one.values(), other.values()))
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return kind in (int, float, complex, bool, str, bytes, type(None)) and one == other


_FILL: dict[type, tuple[Any, ...]] = {
    dict: attrgetter("clear", "update")(dict),
    list: attrgetter("clear", "extend")(list),
    set: attrgetter("clear", "update")(set),
}
_REPLACED = (tuple, type, types.FunctionType, types.ModuleType, Enum, Tensor)


def _overwrite(old: Any, new: Any) -> bool:
    """Fills an object that others may hold too with what `new` holds; False if it cannot be done."""
    kind = cast("Any", type(old))
    if kind is not type(new) or issubclass(kind, _REPLACED):
        return False
    if _is_same(old, new):
        return True  # what it holds may be held by others, too
    attributes: Any = getattr(old, "__dict__", None)
    fill: Any = next((_FILL[base] for base in _FILL if issubclass(kind, base)), None)
    if fill is not None:
        fill[0](old)
        fill[1](old, new)
    elif attributes is None or hasattr(old, "__array_interface__"):
        return False
    if attributes is not None:
        attributes.clear()
        attributes.update(vars(new))
    return True
