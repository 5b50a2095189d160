"""The kinds of containers that user values consist of, and how each is opened and made again."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
import torch.utils._pytree as pytree
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from evenly.structure import Tree

Unpacked: TypeAlias = "tuple[Sequence[Any], Sequence[Any], Any]"

ATOMS: frozenset[type[Any]] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter}
)


class StandIn:
    """Stands in a structure for a tensor that is somewhere else: a leaf, whatever its subclass looks like."""


# A module is not data, a class is not an instance, and a PackedSequence makes sense only in one piece.
_OPAQUE = (torch.Tensor, PackedSequence, StandIn, torch.nn.Module, type, str, bytes)


class Kind(NamedTuple):
    """How one kind of container is taken apart and put together.

    Attributes:
        name: A word for it in error messages.
        unpack: From a container to the keys of its children, the children, and what else must be equal for
            two containers to have the same structure (a `maxlen`, a default factory).
        pack: From a node of a tree and new children to a container of the node's type.
        by_attribute: Whether a user reaches a child as `x.key` and not as `x[key]`.
    """

    name: str
    unpack: Callable[[Any], Unpacked]
    pack: Callable[[Tree, list[Any]], Any]
    by_attribute: bool = False


def kind_of(value: Any) -> Kind | None:
    """How a value is opened; None if it is a leaf."""
    cls = cast("type[Any]", type(value))
    kind = _EXACT.get(cls)
    if kind is not None or cls in ATOMS or isinstance(value, _OPAQUE):
        return kind
    fielded = dataclasses.is_dataclass(cls)
    # Its authors register it as a pytree node as well, but that way its None fields are lost.
    if fielded and issubclass(cls, OrderedDict):
        return _MODEL_OUTPUT
    if cls in pytree.SUPPORTED_NODES:
        return _REGISTERED
    if issubclass(cls, tuple):
        return _NAMEDTUPLE if hasattr(value, "_fields") else _TUPLE_SUBCLASS
    if issubclass(cls, (list, deque)):
        return _LIST_SUBCLASS
    if issubclass(cls, Mapping):
        return _MAPPING if issubclass(cls, MutableMapping) else _FROZEN_MAPPING
    return _DATACLASS if fielded else None


def opens_as_object(value: Any) -> bool:
    """Whether a value is an instance of a plain class with tensors in its attributes, at any depth.

    A cache of keys and values, or a distribution: an object that is a leaf in arguments, where it is the
    user's own, but has to be joined in outputs. One that refers back to itself is none.
    """
    return _is_plain_object(value) and _find_tensor(value, set()) is True


def _is_plain_object(value: Any) -> bool:
    cls = cast("type[Any]", type(value))
    if cls in ATOMS or isinstance(value, _OPAQUE) or cls.__new__ is not object.__new__:
        return False
    return hasattr(value, "__dict__") and not callable(value) and kind_of(value) is None


def _find_tensor(value: Any, above: set[int]) -> bool | None:
    """Whether there is a tensor in a value; None when the value contains itself."""
    if isinstance(value, (torch.Tensor, PackedSequence, StandIn)):
        return True
    kind = kind_of(value)
    if kind is None and not _is_plain_object(value):
        return False
    if id(value) in above:
        return None
    _, children, _ = (kind or OBJECT).unpack(value)
    found = [_find_tensor(child, above | {id(value)}) for child in children]
    return None if None in found else any(found)


def _unpack_object(value: Any) -> Unpacked:
    attributes = cast("dict[str, Any]", vars(value))
    return tuple(attributes), list(attributes.values()), None


def _pack_object(tree: Tree, children: list[Any]) -> Any:
    clone = object.__new__(_type_of(tree))
    cast("dict[str, Any]", vars(clone)).update(zip(tree.keys, children, strict=True))
    return clone


def _unpack_sequence(value: Sequence[Any]) -> Unpacked:
    return range(len(value)), value, None


def _unpack_copied(value: Sequence[Any]) -> Unpacked:
    return range(len(value)), list(value), None


def _unpack_deque(value: deque[Any]) -> Unpacked:
    return range(len(value)), list(value), value.maxlen


def _unpack_mapping(value: Mapping[Any, Any]) -> Unpacked:
    keys = tuple(value)
    return keys, [value[key] for key in keys], None


def _unpack_defaultdict(value: defaultdict[Any, Any]) -> Unpacked:
    return tuple(value), list(value.values()), value.default_factory


def _unpack_namedtuple(value: Any) -> Unpacked:
    return value._fields, value, None


def _unpack_dataclass(value: Any) -> Unpacked:
    # A field may be unset (init=False), and a frozen instance may carry attributes that are no fields.
    fields = [field.name for field in dataclasses.fields(value)]
    names = dict.fromkeys([*fields, *getattr(value, "__dict__", ())])
    keys = tuple(name for name in names if hasattr(value, name))
    return keys, [getattr(value, key) for key in keys], None


def _unpack_model_output(value: Any) -> Unpacked:
    ordered = cast("type[Any]", OrderedDict)
    items = cast("dict[str, Any]", dict(ordered.items(value)))
    # A field that was None at construction and set later is an attribute without being an item.
    others = [field.name for field in dataclasses.fields(value) if field.name not in items]
    others = [name for name in others if getattr(value, name, None) is not None]
    children = list(items.values()) + [getattr(value, name) for name in others]
    return (*items, *others), children, len(items)


def _unpack_registered(value: Any) -> Unpacked:
    definition = pytree.SUPPORTED_NODES[cast("type[Any]", type(value))]
    children, context = definition.flatten_fn(value)
    return range(len(children)), children, context


def _pack_list(tree: Tree, children: list[Any]) -> Any:
    del tree
    return children


def _pack_as_type(tree: Tree, children: list[Any]) -> Any:
    return _type_of(tree)(children)


def _pack_dict(tree: Tree, children: list[Any]) -> Any:
    return _type_of(tree)(zip(tree.keys, children, strict=True))


def _pack_defaultdict(tree: Tree, children: list[Any]) -> Any:
    return defaultdict(tree.extra, zip(tree.keys, children, strict=True))


def _pack_deque(tree: Tree, children: list[Any]) -> Any:
    return deque(children, tree.extra)


def _pack_mapping(tree: Tree, children: list[Any]) -> Any:
    clone: Any = copy.copy(tree.template)
    if not isinstance(tree.template, (dict, UserDict)) and not hasattr(_type_of(tree), "__copy__"):
        # A plain copy shares the dict in which such a class keeps its items: setting them would change the
        # user's.
        attributes = cast("dict[str, Any]", vars(clone))
        for name, part in list(attributes.items()):
            if isinstance(part, MutableMapping):
                attributes[name] = copy.copy(cast("Any", part))
    for key, child in zip(tree.keys, children, strict=True):
        clone[key] = child
    return clone


def _pack_frozen_mapping(tree: Tree, children: list[Any]) -> Any:
    return _type_of(tree)(dict(zip(tree.keys, children, strict=True)))


def _pack_namedtuple(tree: Tree, children: list[Any]) -> Any:
    return _with_attributes(_type_of(tree)._make(children), tree)


def _pack_tuple_subclass(tree: Tree, children: list[Any]) -> Any:
    return _with_attributes(cast("Any", tuple).__new__(_type_of(tree), children), tree)


def _pack_list_subclass(tree: Tree, children: list[Any]) -> Any:
    clone = copy.copy(tree.template)
    clone.clear()
    clone.extend(children)
    return clone


def _pack_dataclass(tree: Tree, children: list[Any]) -> Any:
    # Not the constructor: fields may be init=False, and __post_init__ has already run on these values.
    clone = object.__new__(_type_of(tree))
    for key, child in zip(tree.keys, children, strict=True):
        object.__setattr__(clone, key, child)
    return clone


def _pack_model_output(tree: Tree, children: list[Any]) -> Any:
    cls = _type_of(tree)
    clone = cls.__new__(cls)
    attributes = cast("dict[str, Any]", vars(clone))
    attributes.update(cast("dict[str, Any]", vars(tree.template)))
    for place, (key, child) in enumerate(zip(tree.keys, children, strict=True)):
        if place < tree.extra:
            cast("type[Any]", OrderedDict).__setitem__(clone, key, child)
        attributes[key] = child
    return clone


def _pack_registered(tree: Tree, children: list[Any]) -> Any:
    return pytree.SUPPORTED_NODES[_type_of(tree)].unflatten_fn(children, tree.extra)


def _with_attributes(clone: Any, tree: Tree) -> Any:
    attributes: dict[str, Any] = getattr(tree.template, "__dict__", {})
    for name, value in attributes.items():
        setattr(clone, name, value)
    return clone


def _type_of(tree: Tree) -> Any:
    return tree.type


_LIST_SUBCLASS = Kind("sequence", _unpack_copied, _pack_list_subclass)
_TUPLE_SUBCLASS = Kind("sequence", _unpack_sequence, _pack_tuple_subclass)
_NAMEDTUPLE = Kind("record", _unpack_namedtuple, _pack_namedtuple, by_attribute=True)
_DATACLASS = Kind("record", _unpack_dataclass, _pack_dataclass, by_attribute=True)
_MODEL_OUTPUT = Kind("record", _unpack_model_output, _pack_model_output, by_attribute=True)
_MAPPING = Kind("mapping", _unpack_mapping, _pack_mapping)
_FROZEN_MAPPING = Kind("mapping", _unpack_mapping, _pack_frozen_mapping)
_REGISTERED = Kind("registered", _unpack_registered, _pack_registered)
OBJECT = Kind("object", _unpack_object, _pack_object, by_attribute=True)
TUPLE = Kind("sequence", _unpack_sequence, _pack_as_type)
DICT = Kind("mapping", _unpack_mapping, _pack_dict)
_EXACT: dict[type[Any], Kind] = {
    list: Kind("sequence", _unpack_sequence, _pack_list),
    tuple: TUPLE,
    dict: DICT,
    OrderedDict: DICT,
    defaultdict: Kind("mapping", _unpack_defaultdict, _pack_defaultdict),
    deque: Kind("sequence", _unpack_deque, _pack_deque),
    torch.Size: TUPLE,
    MappingProxyType: _FROZEN_MAPPING,
}
