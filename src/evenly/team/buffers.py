"""A module's buffers on their way from the driver, whose values are the truth, to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from evenly.team.joined import join, split
from evenly.team.protocol import can_travel, receive_tensor, wire_form

if TYPE_CHECKING:
    from evenly.team.wire import Channel


# Private to torch, and untyped.
_flatten: Callable[[Sequence[Tensor]], Tensor] = cast("Any", torch)._utils._flatten_dense_tensors
_unflatten: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = cast("Any", torch)._utils._unflatten_dense_tensors


class Buffers:
    """The buffers of a module, in an order that is the same in every process.

    They are joined into one tensor per dtype, so that a model with hundreds of them costs a few messages, and sent
    only when a value differs from what was sent last. Comparing the bytes is the only proof: writes through ``.data``
    bump no version counter.

    Buffers that require grad are leaves and travel as parameters do; sparse ones travel with the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._slots = [
            (owner._buffers, name)  # pyright: ignore[reportPrivateUsage]
            for owner in module.modules()
            for name, buffer in owner._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if buffer is not None
            and not is_lazy(buffer)
            and can_travel(buffer)
            and not (buffer.is_leaf and buffer.requires_grad)
        ]
        self._groups: dict[torch.dtype, list[int]] = {}
        for position, (owner, name) in enumerate(self._slots):
            buffer = owner[name]
            assert buffer is not None  # noqa: S101 - for the type checker: filtered above
            self._groups.setdefault(buffer.dtype, []).append(position)
        self.shapes = [buffer.shape for buffer in self.current()]
        self._sent: dict[torch.dtype, Tensor] = {}
        """What the driver sent last, on both sides, joined per dtype."""
        self._up_to_date: dict[torch.dtype, set[int]] = {dtype: set() for dtype in self._groups}
        """In the driver: which replicas have it. With few rows some take no part in a call."""

    def current(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [owner[name] for owner, name in self._slots]  # pyright: ignore[reportReturnType]

    def fits(self) -> bool:
        """Whether the buffers still have the names, shapes and dtypes that the replicas know."""
        try:
            buffers = self.current()
        except KeyError:
            return False
        if any(buffer is None for buffer in buffers) or [buffer.shape for buffer in buffers] != self.shapes:  # pyright: ignore[reportUnnecessaryComparison]
            return False
        return all(
            buffers[position].dtype is dtype for dtype, positions in self._groups.items() for position in positions
        )

    def refresh(self) -> None:
        """In the driver, before a call: take the values as they are now.

        Unless :meth:`confirm` follows, what is sent with the call is sent again with the next: it may not have come.
        """
        buffers = self.current() if self._slots else []
        for dtype, positions in self._groups.items():
            joined = join([buffers[position].detach() for position in positions])
            sent = self._sent.get(dtype)
            if sent is None or not _same_bytes(sent, joined):
                self._sent[dtype] = joined
                self._up_to_date[dtype] = set()

    def outgoing(self, replica: int) -> tuple[tuple[Any, ...], list[Tensor]]:
        """What to send to a replica with a call; :meth:`confirm` follows when the replica has answered.

        Returns:
            Per dtype a description of the joined buffers, or None if the replica knows them already; the data.
        """
        specs: list[Any] = []
        data: list[Tensor] = []
        for dtype, known in self._up_to_date.items():
            if replica in known:
                specs.append(None)
                continue
            spec, flat = wire_form(self._sent[dtype])
            specs.append(spec)
            data.append(flat)
        return tuple(specs), data

    def confirm(self, replica: int) -> None:
        """The replica has been sent what :meth:`outgoing` said."""
        for known in self._up_to_date.values():
            known.add(replica)

    def receive(self, channel: Channel, specs: tuple[Any, ...]) -> None:
        """In a replica: take over what the driver sent, and undo what an earlier forward here did to the rest.

        Values are written in place without bumping version counters, as batch normalisation itself does: a graph of
        an earlier forward must not complain.
        """
        if not self._slots:
            return
        buffers = self.current()
        for spec, (dtype, positions) in zip(specs, self._groups.items(), strict=True):
            if spec is not None:
                self._sent[dtype] = receive_tensor(channel, spec)
            targets = [buffers[position].data for position in positions]
            values = split(self._sent[dtype], targets)
            torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateUsage]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality in which NaN equals NaN."""
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
