"""Whether another process can import something by name, or must be given it by value."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import cloudpickle

__all__ = ["register_if_by_value", "travels_by_name"]

# name -> the module that was judged under that name, and the judgement
_judged: dict[str, tuple[types.ModuleType, bool]] = {}


def register_if_by_value(name: str | None) -> None:
    """Sees to it that what module `name` defines travels by value if it cannot be imported elsewhere.

    cloudpickle takes every entry of ``sys.modules`` for importable. Those that exist only there (created with
    ``types.ModuleType``, or loaded from a file that their name does not lead to) are registered with
    ``cloudpickle.register_pickle_by_value``: a fact about the module, true for all users of cloudpickle.
    """
    if name is None or name == "__main__":
        return
    module = sys.modules.get(name)
    known = _judged.get(name)
    if known is not None and known[0] is module:
        return
    if isinstance(module, types.ModuleType):
        by_name = _leads_to(name, module)
        _judged[name] = (module, by_name)
        if not by_name:
            cloudpickle.register_pickle_by_value(module)


def travels_by_name(module: types.ModuleType) -> bool:
    """Whether the module object itself can be had by importing its name."""
    name = module.__name__
    if name == "__main__" or sys.modules.get(name) is not module:
        return False
    known = _judged.get(name)
    if known is None or known[1]:
        return True
    # `torch.ops` and its kin have no file: they come into being when their package is imported.
    root = name.partition(".")[0]
    register_if_by_value(root)
    return root != name and _judged.get(root, (module, False))[1]


def _leads_to(name: str, module: types.ModuleType) -> bool:
    """Whether the import system, asked for `name`, finds what `module` was loaded from."""
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    if spec is not None and spec.origin in ("built-in", "frozen"):
        return True
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return False
    found = _find(name, path)
    if found is None:
        return False
    file = spec.origin if spec is not None and spec.has_location else getattr(module, "__file__", None)
    return file is None or found.origin is None or _same_file(file, found.origin)


def _find(name: str, path: object) -> ModuleSpec | None:
    # As importlib.util.find_spec, which would answer from sys.modules without looking.
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)  # pyright: ignore[reportArgumentType] - path is what Python gave
        except Exception:  # noqa: S112 - a finder that does not know what it was asked
            continue
        if spec is not None:
            return spec
    return None


def _same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return one == other
