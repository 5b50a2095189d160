"""What a replica holds for the driver: values by number, and the operations that are run on them.

None of its commands answers. A failure is kept until the next command that does; until then nothing is run, for all
that the failure has led to would only fail in turn.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evenly.team import errors
from evenly.team.protocol import DTYPES, receive_tensor
from evenly.team.template import Template

if TYPE_CHECKING:
    from evenly.team.wire import Channel


class Store:
    """The values of one replica.

    Args:
        channel: Where tensors come from.

    Attributes:
        values: By number.
        failure: What nobody has been told of yet: an exception; the operation that raised it, and its number.
    """

    def __init__(self, channel: Channel) -> None:
        self.values: dict[int, Tensor] = _Values()
        self.failure: tuple[bytes, str, int] | None = None
        self._channel = channel
        self._templates: dict[int, Template] = {}
        self._last_run_failed = False

    def free(self, handles: tuple[int, ...]) -> None:
        """Forget values."""
        for handle in handles:
            self.values.pop(handle, None)

    def put(self, handle: int, spec: tuple[Any, ...]) -> None:
        """Keep a tensor."""
        self.values[handle] = receive_tensor(self._channel, spec)

    def define(self, number: int, template: bytes) -> None:
        """Remember an operation."""
        self._templates[number] = Template.loads(template)

    def run(self, number: int, inputs: tuple[int | tuple[int, bytes], ...], base: int) -> None:
        """Run a defined operation; its results become values from ``base`` on (none are kept when it is negative).

        Inputs are values by number, or 0-dim tensors as they are: a dtype's number and their bytes.
        """
        self._last_run_failed = False
        if self.failure is not None:
            return
        values, template = self.values, self._templates[number]
        try:
            operands = [values[each] if isinstance(each, int) else _zero_dim(*each) for each in inputs]
            # Tensors from inference mode may be written to in that mode only; the driver is in it, or has failed.
            in_inference = base < 0 and operands[0].is_inference()
            with torch.inference_mode() if in_inference else contextlib.nullcontext():
                result = template.run(operands)
        except BaseException as error:
            self._last_run_failed = True
            self.failure = (errors.describe(error), f"{template.function.name()} on a sharded tensor", abs(base))
            return
        if base < 0:
            return
        if isinstance(result, Tensor):
            values[base] = result
        else:
            for offset, tensor in enumerate(result):
                values[base + offset] = tensor

    def pardon(self) -> None:
        """Forget a failure of the operation just before."""
        if self._last_run_failed:
            self.failure = None

    def rename(self, old: int, new: int) -> None:
        """Keep a value under another number."""
        self.values[new] = self.values.pop(old)

    def abandon(self, base: int, count: int) -> None:
        """Forget whatever values there are with the ``count`` numbers from ``base`` on."""
        for handle in [handle for handle in self.values if base <= handle < base + count]:
            del self.values[handle]


def _zero_dim(dtype: int, data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(())


class _Values(dict[int, Tensor]):
    def __missing__(self, handle: int) -> Tensor:
        message = (
            "rows of this tensor were never computed, because an operation on it or before it has failed "
            f"in this replica (value {handle})"
        )
        raise RuntimeError(message)
