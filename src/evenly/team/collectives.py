"""How parameters get to the replicas and gradients get back, by kind of device.

- :class:`SharedMemory`, for replicas on the CPU: all see the same parameters, so there is nothing to send; each lays
  its gradients where the driver can add them up.
- :class:`Gloo`, for replicas with memory of their own: parameters are broadcast before a forward, gradients are summed
  up through a process group that is private to the team. PyTorch's default group belongs to the user.

Each comes in two halves, the driver's here and the replica's in :mod:`evenly.team.holding`. Which one serves a
kind of device is said in :data:`BY_DEVICE`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from evenly.team.group import BUCKET_BYTES, Group, buckets
from evenly.team.holding import is_dense
from evenly.team.memory import Block, Placement, lay_out
from evenly.team.protocol import Command

if TYPE_CHECKING:
    from collections.abc import Generator

    from evenly.team.team import Team

Kind = Literal["memory", "gloo"]

BY_DEVICE: dict[str, Kind] = {"cpu": "memory"}
"""What serves replicas on a kind of device, unless the user says otherwise."""

ENVIRONMENT = "EVENLY_COLLECTIVES"
"""Names the collectives for all models that do not say otherwise; for trying one out, and for tests."""


class Collectives(Protocol):
    """The driver's half."""

    kind: Kind
    places: list[Placement]

    def sizes(self) -> tuple[int, int]:
        """Bytes of the memory of the parameters, and of that of one replica's gradients; 0 if it is not shared."""
        ...

    def descriptors(self, replica: int) -> tuple[int, ...]:
        """What a replica needs to see them."""
        ...

    def shipped(self) -> None:
        """The replicas have what they need."""
        ...

    def publish(self, *, training: bool) -> None:
        """Before a forward: let the replicas have the parameters as they are now."""
        ...

    def total(self, own: list[Tensor | None], present: Mapping[int, bytes]) -> list[Tensor | None]:
        """Sum the dense gradients of all replicas.

        Args:
            own: The driver's, by leaf; those that are not None are added to in place.
            present: Per replica, per leaf, 1 where it has a dense gradient.
        """
        ...


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
    chosen: str = kind or os.environ.get(ENVIRONMENT) or BY_DEVICE[team.devices[0].type]
    made = {"memory": SharedMemory, "gloo": Gloo}.get(chosen)
    if made is None:
        raise ValueError(f"collectives is {chosen!r}, but there are 'memory' and 'gloo'")
    return made(team, number, leaves)


# ---------------------------------------------------------------------- shared memory


class SharedMemory:
    """Parameters that all replicas see, and gradients that the driver sees."""

    kind: Kind = "memory"

    def __init__(self, team: Team, number: int, leaves: Sequence[Tensor]) -> None:
        del number
        self.places, size = lay_out(leaves)
        self._parameters = Block.allocate(size)
        for leaf, place in zip(leaves, self.places, strict=True):
            shared = self._parameters.tensor(place)
            shared.copy_(leaf.detach())
            leaf.data = shared  # the object stays the same, so that optimizers keep working
        blocks = [Block.allocate(size) for _ in range(1, team.size)]
        self._blocks = blocks
        self._gradients = [[block.tensor(place) for place in self.places] for block in blocks]
        self._all_dense = b"\1" * len(self.places)

    def sizes(self) -> tuple[int, int]:
        """See :class:`Collectives`."""
        return self._parameters.size, self._parameters.size

    def descriptors(self, replica: int) -> tuple[int, ...]:
        """See :class:`Collectives`."""
        return self._parameters.descriptor, self._blocks[replica - 1].descriptor

    def shipped(self) -> None:
        """See :class:`Collectives`."""
        for block in (self._parameters, *self._blocks):
            block.close()

    def publish(self, *, training: bool) -> None:
        """Nothing to do: everybody sees the same memory."""

    def total(self, own: list[Tensor | None], present: Mapping[int, bytes]) -> list[Tensor | None]:
        """See :class:`Collectives`."""
        total = list(own)
        for replica, flags in present.items():
            shared = self._gradients[replica - 1]
            if flags == self._all_dense and all(map(is_dense, total)):  # as in most steps
                torch._foreach_add_(cast("list[Tensor]", total), shared)
                continue
            sums: list[Tensor] = []
            addends: list[Tensor] = []
            for position, flag in enumerate(flags):
                if flag != 1:
                    continue
                before = total[position]
                if before is None:
                    total[position] = shared[position].clone()
                elif before.layout is torch.strided:
                    sums.append(before)
                    addends.append(shared[position])
                else:
                    total[position] = before + shared[position]
            if sums:
                torch._foreach_add_(sums, addends)
        return total


# ---------------------------------------------------------------------- a process group


class Gloo:
    """Copies of the parameters in every replica, kept up to date and summed up through a process group."""

    kind: Kind = "gloo"

    def __init__(self, team: Team, number: int, leaves: Sequence[Tensor]) -> None:
        self.team = team
        self.number = number
        self.leaves = list(leaves)
        self.places, _ = lay_out(leaves)
        self._published: list[int] | None = None

    def sizes(self) -> tuple[int, int]:
        """See :class:`Collectives`."""
        return 0, 0

    def descriptors(self, replica: int) -> tuple[int, ...]:
        """See :class:`Collectives`."""
        del replica
        return ()

    def shipped(self) -> None:
        """See :class:`Collectives`."""

    def publish(self, *, training: bool) -> None:
        """Broadcast the parameters; in evaluation only those that are not what was broadcast last.

        Version counters are no proof that a parameter is unchanged (writes through ``.data`` bump none), so its
        content is: see :func:`fingerprint`.
        """
        published = self._published
        if published is None or training:
            changed = list(range(len(self.leaves)))
            self._published = None
        else:
            now = [fingerprint(leaf) for leaf in self.leaves]
            changed = [position for position, print_ in enumerate(now) if print_ != published[position]]
            self._published = now
        if changed:
            with self._collective(int(Command.BROADCAST), self.number, tuple(changed)) as group:
                for bucket in buckets([self.leaves[position].detach() for position in changed], BUCKET_BYTES):
                    group.broadcast(bucket)
        if not training and self._published is None:
            self._published = [fingerprint(leaf) for leaf in self.leaves]

    def total(self, own: list[Tensor | None], present: Mapping[int, bytes]) -> list[Tensor | None]:
        """See :class:`Collectives`."""
        wanted = [any(flags and flags[position] == 1 for flags in present.values()) for position in range(len(own))]
        total = list(own)
        sums: list[Tensor] = []
        for position, wants in enumerate(wanted):
            if not wants:
                continue
            mine = total[position]
            if mine is None or mine.layout is not torch.strided:
                sums.append(torch.zeros_like(self.leaves[position]))
            else:
                sums.append(mine)
        if sums:
            with self._collective(int(Command.REDUCE), self.number, bytes(wanted), tuple(present)) as group:
                for bucket in buckets(sums, BUCKET_BYTES):
                    group.reduce(bucket)
        summed = iter(sums)
        for position, wants in enumerate(wanted):
            if wants:
                found, before = next(summed), total[position]
                total[position] = found if before is None or before is found else before + found
        return total

    @contextmanager
    def _collective(self, *command: Any) -> Generator[Group]:
        """Have all replicas carry out a command together with the driver.

        Raises:
            ReplicaDied: One of them ended meanwhile.
        """
        team = self.team
        group = team.group()
        team.broadcast(team.size, *command)
        try:
            yield group
        except BaseException as error:
            team.spoil()  # a group that was left in the middle of something is of no use any more
            if isinstance(error, RuntimeError):
                team.check_alive()
            raise


def fingerprint(tensor: Tensor) -> int:
    """A number that is another one when the content of ``tensor`` is, as good as always: also when values only moved.

    It is a sum over all elements' bits, weighted by position: columns and rows have odd weights of their own.
    """
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data)
    if not data.numel():
        return 0
    flat = data.contiguous().view(-1)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(integer)
    width = 1024
    whole = bits.numel() // width * width
    table, rest = bits[:whole].view(-1, width), bits[whole:]
    numbers = torch.arange(1, max(table.shape[0], width) + 1, dtype=torch.int64)
    weights = numbers * 6364136223846793005 + 1442695040888963407  # Knuth's MMIX: all odd or even by turns, never small
    total = (table.sum(0, dtype=torch.int64) * weights[:width]).sum() + (
        rest.long() * weights[: rest.numel()] * 3
    ).sum()
    return int(total + (table.sum(1, dtype=torch.int64) * weights[: table.shape[0]] * 5).sum())
