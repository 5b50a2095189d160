"""Which variables, class attributes and closures the user's own code of a module refers to."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
import sysconfig
import types
import weakref
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

import cloudpickle
from torch import nn

from evenly.team.definitions import is_parametrized, key_of_class
from evenly.team.importable import register_if_by_value, travels_by_name
from evenly.team.namespaces import DELETED, Attribute, Cell, Variable, unwrap

__all__ = ["Collected", "Place", "collect", "importable_namespace", "is_own"]


@dataclass
class Place:
    """Where a value is that code refers to.

    Attributes:
        holder: The namespace, class or cell.
        name: The variable in it.
        address: What other processes call it; None if they cannot find it.
        imported: Whether other processes import what it belongs to.
    """

    holder: Any
    name: str
    address: Variable | Attribute | Cell | None
    imported: bool

    def value(self) -> Any:
        """What is there now, or ``DELETED``."""
        if isinstance(self.holder, types.CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return DELETED
        return (vars(self.holder) if isinstance(self.holder, type) else self.holder).get(self.name, DELETED)

    def names(self) -> list[str]:
        """All attributes of the class."""
        return [*cast("Any", vars(self.holder))]

    def sibling(self, name: str) -> Place:
        """Another attribute of the same class."""
        return _attribute(self.holder, name)


@dataclass
class Collected:
    """What code refers to.

    Attributes:
        places: All of it: variables by namespace, classes whole and one after another, cells.
        classes: The classes.
        absent: Namespaces, and names that code looks for there in vain.
    """

    places: list[Place]
    classes: list[type]
    absent: list[tuple[dict[str, Any], frozenset[str]]]


def collect(module: nn.Module) -> Collected:
    """Collects what the classes, functions and hooks of a module and its submodules refer to."""
    walk = _Walk()
    for part in module.modules():
        walk.value(type(part), None)
        for name, value in vars(part).items():
            if isinstance(value, dict) and name.endswith("hooks"):
                for hook in cast("dict[Any, Any]", value).values():
                    walk.value(hook, None)
            elif isinstance(value, (list, tuple, dict)):
                for item in cast("Any", value.values() if isinstance(value, dict) else value):
                    if type(item) not in _DULL:
                        walk.value(item, None)
            elif type(value) not in _DULL:
                walk.value(value, None)
    return walk.collected()


_DULL = {bool, int, float, str, dict, list, tuple, set, type(None)}


@dataclass
class _Walk:
    variables: dict[int, tuple[dict[str, Any], dict[str, Place]]] = field(default_factory=dict[Any, Any])
    classes: dict[type, list[Place]] = field(default_factory=dict[Any, Any])
    cells: dict[int, Place] = field(default_factory=dict[Any, Any])
    absent: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict[Any, Any])
    seen: dict[int, types.FunctionType] = field(default_factory=dict[int, types.FunctionType])
    modules: set[tuple[int, frozenset[str]]] = field(default_factory=set[tuple[int, frozenset[str]]])

    def collected(self) -> Collected:
        variables = [place for _, places in self.variables.values() for place in places.values()]
        attributes = [place for places in self.classes.values() for place in places]
        absent = [(holder, frozenset(names)) for holder, names in self.absent.values()]
        return Collected([*variables, *attributes, *self.cells.values()], list(self.classes), absent)

    def value(self, value: Any, address: Variable | Attribute | Cell | None) -> None:
        """Follows a function, method or class, and the class of any other object."""
        if isinstance(value, property):
            for function in (value.fset, value.fdel):
                self.value(function, None)
        if isinstance(value, types.MethodType):
            self.value(type(value.__self__), None)
        value = unwrap(value)
        if isinstance(value, types.FunctionType):
            self.function(value, address)
        elif isinstance(value, type):
            for cls in cast("type[Any]", value).__mro__:
                if cls not in self.classes and is_own(cls.__module__) and not issubclass(cls, Enum):
                    self.cls(cast("Any", cls))
        elif not isinstance(value, types.ModuleType):
            wrapped = inspect.getattr_static(value, "__wrapped__", None)
            if isinstance(wrapped, types.FunctionType):
                self.function(wrapped, None)
            self.value(type(value), None)

    def cls(self, cls: type) -> None:
        if is_parametrized(cast("Any", cls)):
            return  # made by torch; the class below it is the user's
        self.classes[cls] = places = [_attribute(cls, name) for name in vars(cls)]
        for place in places:
            value = place.value()
            if type(value) not in _DULL:
                self.value(value, place.address if place.imported else None)

    def function(self, function: types.FunctionType, address: Variable | Attribute | Cell | None) -> None:
        """Follows what a function refers to; by itself, torch's and other installed code is taken as it is."""
        if id(function) in self.seen:
            return
        self.seen[id(function)] = function
        namespace = function.__globals__
        own = is_own(namespace.get("__name__"))
        names, attributes = _names(function.__code__) if own else (_NONE, _NONE)
        for name in names:
            if name in namespace:
                self.variable(namespace, name, attributes)
            elif name not in vars(builtins):
                self.absent.setdefault(id(namespace), (namespace, set()))[1].add(name)
        for index, cell in enumerate(function.__closure__ or ()):
            name = function.__code__.co_freevars[index]
            place = _cell(cell, name, index, address)
            content = place.value()
            if own and name != "__class__" and content is not DELETED:
                self.cells.setdefault(id(cell), place)
            self.content(content, place.address, attributes)

    def variable(self, namespace: dict[str, Any], name: str, attributes: frozenset[str]) -> None:
        """Follows a global variable."""
        places = self.variables.setdefault(id(namespace), (namespace, {}))[1]
        if name not in places:
            module = importable_namespace(namespace)
            address = Variable(id(namespace), module, str(namespace.get("__name__")), name)
            places[name] = Place(namespace, name, address, module is not None)
        place = places[name]
        self.content(namespace[name], place.address if place.imported else None, attributes)

    def content(
        self, value: Any, address: Variable | Attribute | Cell | None, attributes: frozenset[str] = frozenset()
    ) -> None:
        """Follows what a variable holds: of the user's modules what code that has the variable may mean."""
        if isinstance(value, types.ModuleType):
            if is_own(value.__name__) and (id(value), attributes) not in self.modules:
                self.modules.add((id(value), attributes))
                for attribute in attributes & vars(value).keys():
                    self.variable(vars(value), attribute, attributes)
        elif type(value) not in _DULL:
            self.value(value, address)


_NONE: frozenset[str] = frozenset()


def _cell(cell: types.CellType, name: str, index: int, address: Variable | Attribute | Cell | None) -> Place:
    """The place of a variable in the closure of the function that is found at an address."""
    inner = None
    if isinstance(address, Cell):
        inner = Cell(address.root, (*address.path, index), name)
    elif address is not None:
        inner = Cell(address, (index,), name)
    return Place(cell, name, inner, inner is not None)


def _attribute(cls: type, name: str) -> Place:
    imported = _is_imported(cls)
    home = (cls.__module__, cls.__qualname__) if imported else key_of_class(cls)
    return Place(cls, name, Attribute(home, f"{cls.__module__}.{cls.__qualname__}", name), imported)


def _is_imported(cls: type) -> bool:
    """Whether other processes get the class by its name."""
    module = sys.modules.get(cls.__module__)
    if module is None or importable_namespace(vars(module)) is None:
        return False
    found: Any = module
    for part in cls.__qualname__.split("."):
        found = inspect.getattr_static(found, part, None)
    return found is cls


def importable_namespace(namespace: dict[str, Any]) -> str | None:
    """The name under which other processes import the module of a namespace."""
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or vars(module) is not namespace:
        return None
    register_if_by_value(name)
    by_value: Any = cast("Any", cloudpickle).list_registry_pickle_by_value()
    parts = str(name).split(".")
    if any(".".join(parts[:count]) in by_value for count in range(1, len(parts) + 1)):
        return None
    return name if travels_by_name(module) else None


_names_of_code: weakref.WeakKeyDictionary[types.CodeType, tuple[frozenset[str], frozenset[str]]] = (
    weakref.WeakKeyDictionary()
)


def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global names that code reads, in nested functions too, and all names that it mentions."""
    known = _names_of_code.get(code)
    if known is None:
        names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        mentioned = set(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                inner = _names(constant)
                names |= inner[0]
                mentioned |= inner[1]
        known = _names_of_code[code] = frozenset(names), frozenset(mentioned)
    return known


_FOREIGN = {"torch", "evenly", "builtins", "numpy"}


def is_own(name: str | None) -> bool:
    """Whether a module is the user's own, rather than installed or part of Python."""
    if name is None or name == "__main__":
        return True
    module = sys.modules.get(name)
    root = name.partition(".")[0]
    if root in _FOREIGN:
        return False
    return module is None or _is_own_file(name, getattr(module, "__file__", None))


@functools.lru_cache(maxsize=4096)
def _is_own_file(name: str, file: str | None) -> bool:
    if file is None:
        spec = getattr(sys.modules[name], "__spec__", None)
        root = name.partition(".")[0]
        return getattr(spec, "origin", None) not in ("built-in", "frozen") and (root == name or is_own(root))
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    # `scripts` and `data` are roots where anything may lie.
    return not any(str(path).startswith(_paths[kind] + "/") for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


_paths = {kind: str(Path(path).resolve()) for kind, path in sysconfig.get_paths().items()}
