"""What ``torch.compile`` and ``torch.jit.script`` make of functions, on its way to another process.

A compiled function is full of what belongs to its process. What travels is the function that it was made from, and how:
the receiver compiles it anew.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import torch

from evenly.team.importable import register_if_by_value, travels_by_name

__all__ = ["reduce_compiled", "reduce_scripted"]

_script = cast("Callable[..., Any]", cast("Any", torch.jit).script)


def reduce_compiled(function: types.FunctionType) -> Any:
    """How pickle is to save a function that ``torch.compile`` or ``torch.compiler.disable`` returned.

    Returns:
        None for any other function, and for one that can be had by importing its module.
    """
    original = function.__dict__.get("_torchdynamo_orig_callable")
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if original is None or dynamo is None or _is_importable(function, function):
        return None
    for cell in function.__closure__ or ():
        # Functions of the user's that wrap a compiled one have its attributes, but not this.
        if isinstance(cell.cell_contents, dynamo._TorchDynamoContext):
            return _apply, (cell.cell_contents, original)
    return None


def reduce_scripted(function: Any) -> Any:
    """How pickle is to save a function that ``torch.jit.script`` returned."""
    original: types.FunctionType | None = function.__dict__.get("_torchdynamo_inline")
    if original is None:  # traced: nobody knows what it was made from
        return NotImplemented
    if _is_importable(function, original):
        return _attribute_of, (original.__module__, original.__qualname__)
    return _script, (original,)


def _is_importable(thing: object, named: types.FunctionType) -> bool:
    register_if_by_value(named.__module__)
    module = sys.modules.get(named.__module__)
    return module is not None and travels_by_name(module) and getattr(module, named.__qualname__, None) is thing


def _apply(how: Callable[[Any], Any], function: Any) -> Any:
    return how(function)


def _attribute_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
