"""Keeps the first operation on a sharded tensor from importing all of ``torch.distributed.tensor``.

[Note: DTensor] Before torch asks any tensor subclass how it carries out an operation, it wants to know whether that is
a ``DTensor``, and imports that class: with SymPy and all, most of a second, in programs that have never heard of it.
It does so once per process and then remembers the class. Here it gets to remember one whose instances are the DTensors
of this process, if there should ever be any.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

_NAME = "torch.distributed.tensor"


class _WhenImported(type):
    """Makes a class stand for ``DTensor``, which need not have been imported."""

    def __instancecheck__(cls, instance: object) -> bool:
        real = getattr(sys.modules.get(_NAME), "DTensor", None)
        return real is not None and real is not cls and isinstance(instance, real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(sys.modules[_NAME].DTensor, name)


class _StandIn(metaclass=_WhenImported):
    pass


class _Asked(torch.Tensor):
    """A tensor subclass for torch to ask, whose answers do not matter."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> torch.Tensor:
        return torch.empty(0)


def spare_import() -> None:
    """Let torch remember a stand-in for ``DTensor``, unless that has been imported already."""
    if _NAME in sys.modules:
        return
    module = types.ModuleType(_NAME)
    module.DTensor = _StandIn  # type: ignore[attr-defined]
    asked = torch.Tensor._make_wrapper_subclass(_Asked, (0,))
    sys.modules[_NAME] = module
    try:
        torch.ops.aten.neg.default(asked)
    finally:
        del sys.modules[_NAME]
