"""Classes, functions and modules of Python on their way to another process.

[Note: whose class] A class that travels by value is defined in one process, its home; elsewhere it is a copy.
Where a process already has the class of a key, it keeps it, and at home its definition, too: otherwise
cloudpickle would overwrite the methods of the user's own class with copies whose globals are cut off from the
user's script. On the way home the key is enough.
"""

from __future__ import annotations

import importlib
import marshal
import pickle
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.nn.utils import parametrize

from evenly.team.importable import register_if_by_value, travels_by_name

__all__ = [
    "class_of_key",
    "is_parametrized",
    "key_of_class",
    "reduce_class",
    "reduce_code",
    "reduce_parametrized",
    "reduce_python_module",
]

_LENGTH_BY_VALUE = 6  # cloudpickle's reductions by value end in a function that sets the state

_class_keys: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_received_classes: weakref.WeakSet[type] = weakref.WeakSet()


def reduce_class(cls: type, reduce_by_value: Callable[[type], Any], *, homeward: bool) -> Any:
    """How pickle is to save a class: by name, by key, by recipe or by value.

    Args:
        cls: The class.
        reduce_by_value: cloudpickle's answer.
        homeward: Whether the receiver is where all received classes came from.
    """
    if homeward and cls in _received_classes:  # [Note: whose class]
        return _resolve_class, (_class_keys[cls], None, None)
    names = _parametrized_names(cls)
    if names:
        return _parametrized_class, (cls.__mro__[1], names)
    register_if_by_value(cls.__module__)
    reduction = reduce_by_value(cls)
    if not (isinstance(reduction, tuple) and len(cast("tuple[Any, ...]", reduction)) == _LENGTH_BY_VALUE):
        return cast("Any", reduction)
    make, args, state, _, _, set_state = cast("tuple[Any, ...]", reduction)
    return _resolve_class, (key_of_class(cls), make, args), (set_state, state), None, None, _define_class


def reduce_code(code: types.CodeType) -> Any:
    """How pickle is to save a code object: with its file name and lines."""
    try:
        # cloudpickle renames the file to "<dynamic-code>"; marshal keeps file name and line table.
        return marshal.loads, (marshal.dumps(code),)
    except ValueError:  # constants that no compiler makes
        return NotImplemented


def reduce_python_module(module: types.ModuleType) -> Any:
    """How pickle is to save a module of Python: by name, or by value if only this process has it."""
    register_if_by_value(module.__name__)
    if travels_by_name(module):
        return importlib.import_module, (module.__name__,)
    return NotImplemented


def is_parametrized(cls: type) -> bool:
    """Whether ``torch.nn.utils.parametrize`` made this class."""
    return getattr(cls.__dict__.get("__getstate__"), "__module__", None) == parametrize.__name__


def reduce_parametrized(module: nn.Module) -> Any:
    """How pickle is to save a parametrized module.

    torch refuses to pickle these because their class cannot be imported; here the class is made again.
    """
    cls: Any = type(module)
    return _new_instance, (cls,), cls.__mro__[1].__getstate__(module)


def key_of_class(cls: type) -> str:
    """What all processes call a class that travels by value."""
    key = _class_keys.setdefault(cls, uuid.uuid4().hex)
    _classes[key] = cls
    return key


def class_of_key(key: str) -> type | None:
    """The class of :func:`key_of_class`, if it is here."""
    return _classes.get(key)


def _resolve_class(key: str, make: Callable[..., type] | None, args: tuple[Any, ...] | None) -> type:
    """The class that `key` means here: our own, or one received earlier, or a new one."""
    cls = _classes.get(key)
    if cls is None:
        if make is None or args is None:
            raise pickle.UnpicklingError("a class that was defined and sent from here no longer exists here")
        cls = make(*args)
        _class_keys[cls] = key
        _classes[key] = cls
        _received_classes.add(cls)
    return cls


def _define_class(cls: type, definition: tuple[Callable[[type, Any], None], Any]) -> None:
    if cls in _received_classes:  # [Note: whose class]
        set_state, state = definition
        set_state(cls, state)


def _parametrized_names(cls: type) -> list[str]:
    if not is_parametrized(cls):
        return []
    return [
        name
        for name, value in cls.__dict__.items()
        if isinstance(value, property) and getattr(value.fget, "__module__", "") == parametrize.__name__
    ]


def _parametrized_class(base: type[nn.Module], names: list[str]) -> type[nn.Module]:
    # Made by torch again, not by value: its properties read `parametrize.cached`'s global switch.
    shell = base.__new__(base)
    nn.Module.__init__(shell)
    parametrize._inject_new_class(shell)  # pyright: ignore[reportPrivateUsage]
    for name in names:
        parametrize._inject_property(shell, name)  # pyright: ignore[reportPrivateUsage]
    return type(shell)


def _new_instance(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)
