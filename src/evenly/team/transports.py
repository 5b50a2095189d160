"""The transports by name: a new one is one line in :data:`TRANSPORTS`, and choosing it one in :data:`BY_DEVICE`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from evenly.team.collectives import Collectives, Kind, SharedMemory, ThroughGroup
from evenly.team.group import Gloo, Group
from evenly.team.holding import Holding, LeafSpec, OwnHolding, SharedHolding
from evenly.team.memory import Block

if TYPE_CHECKING:
    from evenly.team.team import Team


class Transport(NamedTuple):
    """What a transport consists of.

    One that goes through a process group takes :class:`~evenly.team.collectives.ThroughGroup` as it is and brings a
    :class:`~evenly.team.group.Group` of its own, which connects, and knows what it can sum up. Where parameters lie in
    other memory than the CPU's, it also brings an :class:`~evenly.team.holding.OwnHolding` that makes its leaves there,
    and a fingerprint that is computed there (see :mod:`~evenly.team.fingerprints`; it must miss nothing either).

    Attributes:
        driver: Makes the driver's half for one model: of its team, its number, its parameters and the transport's name.
        replica: Makes the replica's half: of descriptions of the parameters and the blocks of memory that the driver
            shares.
        group: Makes one member of the process group, once per team, if there is one.
    """

    driver: Callable[[Team, int, Sequence[Tensor], Kind], Collectives]
    replica: Callable[[Sequence[LeafSpec], Sequence[Block]], Holding]
    group: type[Group] | None = None


TRANSPORTS: dict[Kind, Transport] = {
    "memory": Transport(SharedMemory, SharedHolding),
    "gloo": Transport(ThroughGroup, OwnHolding, Gloo),
}

BY_DEVICE: dict[str, Kind] = {"cpu": "memory"}
"""What serves replicas on a kind of device, unless the user says otherwise."""

ENVIRONMENT = "EVENLY_COLLECTIVES"
"""Names the transport for all models that do not say otherwise; for trying one out, and for tests."""


def collectives_for(team: Team, number: int, leaves: Sequence[Tensor], kind: Kind | None) -> Collectives:
    """The driver's half for one model.

    Args:
        team: Its replicas.
        number: Its number there.
        leaves: Its parameters. Where memory is shared their storage is moved.
        kind: Which one; the device's own by default.

    Raises:
        ValueError: There is no such kind.
    """
    chosen: Kind = kind or os.environ.get(ENVIRONMENT) or BY_DEVICE[team.devices[0].type]
    transport = TRANSPORTS.get(chosen)
    if transport is None:
        known = " and ".join(map(repr, TRANSPORTS))
        raise ValueError(f"collectives is {chosen!r}, but there are {known}")
    return transport.driver(team, number, leaves, chosen)
