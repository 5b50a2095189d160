"""The process groups of a team: how they come about, and what became of one that failed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from evenly.team.group import Group, GroupError
from evenly.team.memory import Block
from evenly.team.protocol import Command, encode

if TYPE_CHECKING:
    from evenly.team.collectives import Kind
    from evenly.team.team import Team

_ANSWER_SECONDS = 2
"""How long replicas may take to tell why they did not take part."""


def group_of(team: Team, kind: Kind) -> Group:
    """The team's process group of a kind, formed when it is first needed.

    Raises:
        GroupError: Somebody cannot take part.
        TimeoutError: Somebody does not come.
    """
    if kind in team.groups:
        return team.groups[kind]
    from evenly.team.rendezvous import rendezvous_bytes
    from evenly.team.transports import TRANSPORTS

    make = TRANSPORTS[kind].group
    assert make is not None  # noqa: S101 - who asks needs one
    block = Block.allocate(rendezvous_bytes(team.size))
    token = team.reserve(1)
    for replica in range(1, team.size):
        team.send_descriptors(replica, token, (block.descriptor,))
    team.broadcast(team.size, int(Command.GROUP), token, kind)
    team.groups[kind] = group = make(os.dup(block.descriptor), 0, team.size, team.watch)
    return group


def why_not_together(team: Team) -> BaseException | None:
    """After a collective failed: what a replica met that kept it from taking part, if one tells of it.

    Raises:
        ReplicaDied: One of them has ended.
    """
    from evenly.team.team import TookTooLongError

    for group in team.groups.values():
        group.leave()  # somebody may be waiting for the driver
    reason: BaseException | None = None
    try:
        with team.within(_ANSWER_SECONDS):
            for replica in range(1, team.size):
                team.ask(replica, encode((int(Command.REPORT),)))
            for replica in range(1, team.size):
                answer = team.answer(replica)
                if reason is None and isinstance(answer, BaseException) and not isinstance(answer, GroupError):
                    reason = answer
    except TookTooLongError:
        pass
    return reason


def disown(groups: dict[Kind, Group]) -> None:
    """In a forked child: forget them."""
    for group in groups.values():
        group.disown()
    groups.clear()
