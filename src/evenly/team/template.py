"""An operation with everything but its tensors: sent to the replicas once, then referred to by number."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor


class Slot(int):
    """Stands for the tensor of that position in an operation's arguments."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SizeOf:
    """Stands for the size of the tensor in a slot, along a dimension: each replica's own."""

    slot: int
    dim: int


@dataclass(eq=False)
class Template:
    """An aten operation whose tensor arguments are left open.

    Attributes:
        function: The overload.
        args, kwargs: Its arguments, with a :class:`Slot` for each tensor (inside lists and tuples, too).
    """

    function: torch._ops.OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _flat: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._flat = not self.kwargs and not any(isinstance(arg, (list, tuple, SizeOf)) for arg in self.args)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Call the operation with ``tensors`` in its slots."""
        if self._flat:
            return self.function(*[tensors[arg] if type(arg) is Slot else arg for arg in self.args])
        kwargs = {name: _fill(value, tensors) for name, value in self.kwargs.items()}
        return self.function(*[_fill(arg, tensors) for arg in self.args], **kwargs)

    def dumps(self) -> bytes:
        """The template as bytes; overloads travel by name."""
        return pickle.dumps((self.function.name(), self.args, self.kwargs))

    @classmethod
    def loads(cls, data: bytes) -> Template:
        """The template that :meth:`dumps` wrote."""
        name, args, kwargs = pickle.loads(data)
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        return cls(function, args, kwargs)


def _fill(value: Any, tensors: Sequence[Tensor]) -> Any:
    if type(value) is Slot:
        return tensors[value]
    if type(value) is SizeOf:
        return tensors[value.slot].shape[value.dim]
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return type(items)([_fill(item, tensors) for item in items])
    return value
