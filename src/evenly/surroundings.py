"""What a module's code reads from outside of the module, and noticing when it changes between two calls.

Global variables, helper functions, attributes of classes, closures: the user's program may set all of them at any
time. Those that the user's own functions refer to are collected when the module is shipped; looking whether they are
the same is a few passes of C loops afterwards, as in :mod:`evenly.watch`.
"""

from __future__ import annotations

import types
from abc import ABCMeta
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenly.reach import Collected, Place, collect, importable_namespace, is_own
from evenly.snapshot import Snapshot, Snapshots
from evenly.team.namespaces import DELETED, Variable, unwrap
from evenly.team.shipping import ByValue
from evenly.watch import Identities

__all__ = ["Setting", "Surroundings"]

_DEEPEST = 5
_LARGEST_ARRAY = 1 << 16  # bytes, as in snapshots
_MOST_ENTRIES = 1_000
_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class Setting:
    """A value for a place outside of the module.

    Attributes:
        place: Where it goes.
        value: What to set there, or ``DELETED``.
        in_place: Whether the object that is there is the same and only what it holds changed.
    """

    place: Any
    value: object
    in_place: bool

    def apply(self) -> None:
        """Sets it."""
        self.place.set(self.value, in_place=self.in_place)


# Places in importable modules, and deletions, that replicas started later must be told of, too.
_changed: dict[Any, Place] = {}


class Surroundings:
    """Compares what a module's code reads from outside with how it was.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: dict[Any, Place] = {}
        self._disturbed = False
        self._collect()

    def _collect(self) -> None:
        found: Collected = collect(self._module)
        self._places = found.places
        self._proxies = [vars(cls) for cls in found.classes]
        self._cells = [place.holder for place in found.places if isinstance(place.holder, types.CellType)]
        self._absent = found.absent
        names: dict[int, tuple[Any, list[str]]] = {}
        for place in found.places:
            if not isinstance(place.holder, (type, types.CellType)):
                names.setdefault(id(place.holder), (place.holder, []))[1].append(place.name)
        # Asked for one item, an itemgetter gives no tuple.
        self._variables = [(itemgetter(*wanted, wanted[0]), holder) for holder, wanted in names.values()]
        self._take()

    def _take(self, changed: Iterable[int] | None = None) -> None:
        """The present values become the baseline, of all places or some."""
        if changed is None:
            changed = range(len(self._places))
            self._saved: list[object] = [None] * len(self._places)
            self._identities: list[object] = [None] * len(self._places)
        snapshots = Snapshots()
        for index in changed:
            value = self._identities[index] = self._places[index].value()
            self._saved[index] = snapshots.take(value) if is_plain(value) else value
        both = zip(self._identities, self._saved, strict=True)
        self._mutable = [(value, saved) for value, saved in both if isinstance(saved, Snapshot)]
        self._keys = _keys(self._proxies)
        self._fast = Identities(self._values())

    def _values(self) -> Iterable[Any]:
        return chain(
            chain.from_iterable([get(holder) for get, holder in self._variables]),
            chain.from_iterable(map(_values_of, self._proxies)),
            map(_content_of, self._cells),
        )

    def _hold(self) -> bool:
        """Whether all is the same; may say no where :meth:`changes` finds none."""
        try:
            return (
                self._fast.are_those_of(self._values())
                and _keys(self._proxies) == self._keys
                and all(saved.matches(value) for value, saved in self._mutable)
                and all(holder.keys().isdisjoint(names) for holder, names in self._absent)
            )
        except (KeyError, ValueError):  # a variable was deleted, a cell emptied
            return False

    def settle(self) -> None:
        """What forward has set is the new baseline: it did so in each replica for itself."""
        if self._places and not self._hold():
            differences = self._differences()
            self._written.update((d.place.address, d.place) for d in differences if d.place.address is not None)
            self._rebase(differences)

    def disturbed(self) -> None:
        """A replica ran forward more often than the others: what forward writes must be sent, to be right there."""
        self._disturbed = True

    def initial(self) -> list[Setting]:
        """What replicas that import the module's code must be told of: its variables as the program has set them."""
        found: dict[Any, Setting] = {}
        holders: set[int] = set()
        for place in self._places:
            holders.add(id(place.holder))
            address = place.address
            if address is None or not place.imported or place.name.startswith("__"):
                continue
            value = place.value()
            if (
                address in _changed
                or _is_of_script(value)
                or _is_of_other_module(place)
                or (is_plain(value) and _can_be_set(place.holder))
            ):
                found[address] = Setting(address, _to_send(place), in_place=True)
        for address, place in _changed.items():
            if id(place.holder) in holders and place.value() is DELETED:
                found[address] = Setting(address, DELETED, in_place=False)
        return list(found.values())

    def changes(self) -> list[Setting] | None:
        """What differs from the baseline, which becomes the present; None if the module must be sent again."""
        settings: list[Setting] = []
        if self._disturbed:
            self._disturbed = False
            both = ((address, place.value()) for address, place in self._written.items())
            settings += [Setting(address, value, in_place=True) for address, value in both if is_plain(value)]
        if not (self._places or self._absent) or self._hold():
            return settings
        again = any(not holder.keys().isdisjoint(names) for holder, names in self._absent)
        differences = self._differences()
        for difference in differences:
            place, value = difference.place, difference.place.value()
            if place.address is None:
                again = True
            elif place.imported or value is DELETED:
                _changed[place.address] = place
                settings.append(Setting(place.address, _to_send(place), difference.in_place))
            elif is_plain(value) and is_plain(difference.old):
                settings.append(Setting(place.address, value, difference.in_place))
            else:
                again = True
        self._rebase(differences, again=again)
        return None if again else settings

    def _rebase(self, differences: list[_Difference], *, again: bool = False) -> None:
        indices = [difference.index for difference in differences if difference.index is not None]
        if again or len(indices) < len(differences) or not all(is_plain(d.place.value()) for d in differences):
            self._collect()  # other code perhaps, which reads other things
        elif any(difference.place.value() is DELETED for difference in differences):
            self._collect()
        else:
            self._take(indices)

    def _differences(self) -> list[_Difference]:
        found: list[_Difference] = []
        known: dict[int, set[str]] = {}
        holders: dict[int, Place] = {}
        for index, (place, saved, old) in enumerate(zip(self._places, self._saved, self._identities, strict=True)):
            if isinstance(place.holder, type):
                known.setdefault(id(place.holder), set()).add(place.name)
                holders[id(place.holder)] = place
            if not _matches(place.value(), saved, old) and not _is_of_python(place):
                found.append(_Difference(index, place, old, in_place=place.value() is old))
        for holder, place in holders.items():
            new = [place.sibling(name) for name in place.names() if name not in known[holder]]
            found += [_Difference(None, place, None, in_place=False) for place in new if not _is_of_python(place)]
        return found


@dataclass
class _Difference:
    """A place where something else is than before; without an index it is new."""

    index: int | None
    place: Place
    old: object
    in_place: bool


def _matches(value: object, saved: object, old: object) -> bool:
    if isinstance(saved, Snapshot):
        return saved.matches(value)
    # A number that is equal is no change.
    return value is old or (isinstance(old, _ATOMS) and type(value) is type(old) and value == old)


def _is_of_python(place: Place) -> bool:
    """Whether an attribute of a class is one that Python makes when somebody asks for it."""
    if not isinstance(place.holder, type):
        return False
    return place.name == "_abc_impl" or (place.name.startswith("__") and is_plain(place.value()))


def _can_be_set(holder: object) -> bool:
    """Whether an entry may be set again without more ado."""
    return not isinstance(holder, type) or type(holder) in (type, ABCMeta)


def _is_of_other_module(place: Place) -> bool:
    """Whether a method is a function of another of the user's modules, which may have set it."""
    function = unwrap(place.value())
    if not (isinstance(place.holder, type) and isinstance(function, types.FunctionType)):
        return False
    name = importable_namespace(function.__globals__)
    return (
        name is not None
        and name != place.holder.__module__
        and is_own(name)
        and function.__globals__.get(function.__name__) is function
    )


def _is_of_script(value: object) -> bool:
    """Whether something was defined by the program itself, so that no import brings it."""
    value = unwrap(value)
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__") == "__main__"
    return (value if isinstance(value, type) else type(value)).__module__ == "__main__"


def _to_send(place: Place) -> object:
    """The value of a place, made so that it arrives as it is here."""
    value = place.value()
    if not place.imported:
        return value
    if isinstance(value, staticmethod):
        return staticmethod(_by_value(cast("Any", value).__func__))
    if isinstance(value, classmethod):
        return classmethod(_by_value(cast("Any", value).__func__))
    if isinstance(value, property):
        return property(_by_value(value.fget), _by_value(value.fset), _by_value(value.fdel))
    if isinstance(value, type) and _is_defined_at(place, value):
        message = (
            f"{place.address} became another class after the replicas had imported it, and its name leads them to "
            "the earlier one: make the model anew, of the new class, and wrap that"
        )
        raise ValueError(message)
    return _by_value(value)


def _is_defined_at(place: Place, cls: type) -> bool:
    address = place.address
    return isinstance(address, Variable) and (cls.__module__, cls.__qualname__) == (address.module, address.name)


def _by_value(value: Any) -> Any:
    if not isinstance(value, types.FunctionType):
        return value
    return ByValue(value, importable_namespace(value.__globals__))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value says all there is to it: numbers, strings, tensors without grad, and what is made of those."""
    kind = cast("type[Any]", type(value))
    if value is DELETED or isinstance(value, (*_ATOMS, Enum)):
        return True
    if issubclass(kind, Tensor):
        return kind is Tensor and not value.requires_grad
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return value.dtype.kind in "biufc" and value.nbytes <= _LARGEST_ARRAY
    attributes: Any = getattr(value, "__dict__", None)
    parts: list[Any] = [] if attributes is None else [*attributes.values()]
    if issubclass(kind, dict):
        parts += [*value.keys(), *value.values()]
    elif kind in (list, set, frozenset) or issubclass(kind, tuple):
        parts += [*value]
    elif attributes is None or not _is_made_of_attributes(kind):
        return False
    return depth < _DEEPEST and len(parts) <= _MOST_ENTRIES and all(is_plain(part, depth + 1) for part in parts)


def _is_made_of_attributes(kind: type[Any]) -> bool:
    """Whether objects of a class are what their ``__dict__`` holds: those of configurations, mostly."""
    return (
        not issubclass(kind, (type, types.FunctionType, types.ModuleType, types.MethodType, nn.Module))
        and not hasattr(kind, "__slots__")
        and (kind.__reduce__ is object.__reduce__ or kind is types.SimpleNamespace)
        and all(
            cls is object or cls.__flags__ & _MADE_BY_CLASS_STATEMENT
            for cls in kind.__mro__
            if cls is not types.SimpleNamespace
        )
    )


_MADE_BY_CLASS_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_values_of = methodcaller("values")
_content_of = attrgetter("cell_contents")


def _keys(proxies: Iterable[Any]) -> list[str]:
    return list(chain.from_iterable(proxies))
