"""A replica's part in the process groups of its team."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from evenly.team.holding import OwnHolding
from evenly.team.transports import TRANSPORTS
from evenly.team.wire import Channel, ChannelClosedError

if TYPE_CHECKING:
    from evenly.team.collectives import Kind
    from evenly.team.group import Group
    from evenly.team.model import Model


class Membership:
    """The groups that this replica is a member of.

    Args:
        channel: The line to the driver.
        index: This replica.
        count: How many there are.
    """

    def __init__(self, channel: Channel, index: int, count: int) -> None:
        self._channel = channel
        self._index = index
        self._count = count
        self._groups: dict[Kind, Group] = {}

    def join(self, token: int, kind: Kind) -> None:
        """Become part of a process group of the team; the descriptor of the memory in which it meets came before."""
        (descriptor,) = self._channel.claim_descriptors(token)
        group = TRANSPORTS[kind].group
        assert group is not None  # noqa: S101 - the driver knows
        self._groups[kind] = group(descriptor, self._index, self._count, self._check_driver)

    @contextmanager
    def together(self, model: Model) -> Generator[tuple[OwnHolding, Group]]:
        """Around a collective: if this replica fails, the others hear of it and do not wait in vain."""
        assert isinstance(model.holding, OwnHolding)  # noqa: S101 - the driver knows
        try:
            yield model.holding, self._groups[model.kind]
        except BaseException:
            group = self._groups.pop(model.kind, None)
            if group is not None:
                group.leave()
            raise

    def _check_driver(self) -> None:
        if not self._channel.take_descriptors():
            message = "the driver closed its end"
            raise ChannelClosedError(message)
