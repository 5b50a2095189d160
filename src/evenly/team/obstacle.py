"""What in an object keeps it from travelling to another process, and what to do about it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

__all__ = ["explain_obstacle", "unpicklable_path"]

_MOST_STEPS = 2000  # packs tried; every step down the path costs one for each sibling


def explain_obstacle(obj: object, name: str, error: Exception, pack: Callable[[object], None]) -> str:
    """The message of a ShippingError: path, type, cause, remedy.

    Args:
        obj: What could not be packed.
        name: What the user calls it.
        error: How packing it failed.
        pack: Packs a part; raises if it cannot.
    """
    path, culprit, error, owner = _search(obj, name, error, pack)
    cls = type(culprit)
    kind = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(culprit, torch.jit.ScriptModule):
        remedy = (
            "TorchScript modules hold their parameters where no other process can share them. Give the "
            "module that it was made from; torch.compile works on that."
        )
    else:
        holder = type(owner).__qualname__ if isinstance(owner, nn.Module) else "its class"
        remedy = (
            "Each replica needs a copy of its own; locks, open files, sockets, generators and the like "
            "belong to one process. Create it in forward at first use, or leave it out in __getstate__ of "
            f"{holder}."
        )
    cause = f"{type(error).__name__}: {error}"
    return f"{path} cannot be sent to another process: it is a {kind} ({cause}). {remedy}"


def unpicklable_path(obj: object, root_name: str, pack: Callable[[object], None]) -> str:
    """The path to the innermost part of `obj` that `pack` refuses, e.g. ``model.encoder.lock``."""
    return _search(obj, root_name, TypeError(), pack)[0]


def _search(
    obj: object, path: str, error: Exception, pack: Callable[[object], None]
) -> tuple[str, object, Exception, object]:
    owner, seen, steps = obj, {id(obj)}, 0
    while True:
        for step, part in _parts(obj):
            steps += 1
            if id(part) in seen or steps > _MOST_STEPS:
                continue
            try:
                pack(part)
            except Exception as failure:  # whichever way it fails, it is in the way
                error = failure
                seen.add(id(part))
                owner = obj if isinstance(obj, nn.Module) else owner
                obj, path = part, path + step
                break
        else:
            return path, obj, error, owner


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    """What `obj` consists of, each with what is added to the path."""
    if isinstance(obj, (str, bytes, int, float, complex, types.ModuleType, torch.jit.ScriptModule)):
        return
    if isinstance(obj, Mapping):
        for key, value in cast("Mapping[Any, Any]", obj).items():
            yield f"[{key!r}]", value
            yield f" (key {key!r})", key
    elif isinstance(obj, (Sequence, set, frozenset)):
        for index, value in enumerate(cast("Sequence[Any]", obj)):
            yield (f"[{index}]" if isinstance(obj, Sequence) else f" (element {index})"), value
    elif isinstance(obj, types.FunctionType):
        yield from _parts_of_function(obj)
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        partial = cast("functools.partial[Any]", obj)
        yield ".func", partial.func
        yield ".args", partial.args
        yield ".keywords", partial.keywords
    elif isinstance(obj, nn.Module):
        yield from _parts_of_module(obj)
    yield from _attributes(cast("object", obj))


def _parts_of_module(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, child in module.named_children():
        yield (f"[{name}]" if name.isdigit() else f".{name}"), child
    for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        yield f".{name}", tensor


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" (closure variable {name!r})", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f" (global {name!r})", function.__globals__[name]


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


# Parts that have a path of their own, and parts of a class that are made anew.
_SEEN_OTHERWISE = {"_modules", "_parameters", "_buffers", "__dict__", "__weakref__", "_abc_impl"}


def _attributes(obj: object) -> Iterator[tuple[str, object]]:
    state: object = getattr(obj, "__dict__", None)
    if isinstance(state, Mapping):
        for name, value in list(cast("Mapping[str, Any]", state).items()):
            if name not in _SEEN_OTHERWISE:
                yield f".{name}", value
    for cls in type(obj).__mro__:
        slots: Any = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(obj, name):
                yield f".{name}", getattr(obj, name)
    if not isinstance(obj, type):
        yield f" (its class {type(obj).__qualname__})", type(obj)
