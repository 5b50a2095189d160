"""The arguments of an operation, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast


def mapped(value: Any, change: Callable[..., Any], *options: Any) -> Any:
    """An argument with ``change`` made to it, or to the items of a list or tuple.

    A closure that called itself would be a reference cycle, and keep a step's tensors until the collector comes by.
    """
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return type(items)([mapped(item, change, *options) for item in items])
    return change(value, *options)
