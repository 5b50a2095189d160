"""How parameters get to the replicas and gradients get back, by kind of device.

- :class:`SharedMemory`, for replicas on the CPU: all see the same parameters, so there is nothing to send; each lays
  its gradients where the driver can add them up.
- :class:`ThroughGroup`, for replicas with memory of their own: parameters are broadcast before a forward, gradients are
  summed up through a process group that is private to the team. PyTorch's default group belongs to the user.

Each comes in two halves, the driver's here and the replica's in :mod:`evenly.team.holding`. Which ones there are, and
which one serves a kind of device, is said in :mod:`evenly.team.transports`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from evenly.team import groups
from evenly.team.fingerprints import fingerprint
from evenly.team.group import BUCKET_BYTES, Group, GroupError, buckets
from evenly.team.holding import is_dense
from evenly.team.memory import Block, Placement, lay_out
from evenly.team.protocol import Command

if TYPE_CHECKING:
    from collections.abc import Generator

    from evenly.team.team import Team

Kind: TypeAlias = str
"""The name of a transport."""


class Collectives(Protocol):
    """The driver's half, for one model.

    Its methods are called by the thread that holds the team's lock. What they wait for must end when a replica dies
    and when the user presses Ctrl-C, and after a failure :meth:`Team.spoil` must be called if a replica may be left in
    the middle of something.

    Attributes:
        kind: The name of the transport.
        places: The geometry of the parameters as replicas have them, in the order of the leaves.
    """

    kind: Kind
    places: list[Placement]

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block of memory that is shared with a replica."""
        ...

    def descriptors(self, replica: int) -> tuple[int, ...]:
        """A file descriptor for each of them."""
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


# ---------------------------------------------------------------------- shared memory


class SharedMemory:
    """Parameters that all replicas see, and gradients that the driver sees."""

    def __init__(self, team: Team, number: int, leaves: Sequence[Tensor], kind: Kind) -> None:
        del number
        self.kind = kind
        self.places, size = lay_out(leaves)
        self._parameters = Block.allocate(size)
        for leaf, place in zip(leaves, self.places, strict=True):
            # The first call may be in inference mode; parameters are to be trained afterwards all the same.
            with torch.inference_mode(leaf.is_inference()):
                shared = self._parameters.tensor(place)
                shared.copy_(leaf.detach())
                leaf.data = shared  # the object stays the same, so that optimizers keep working
        blocks = [Block.allocate(size) for _ in range(1, team.size)]
        self._blocks = blocks
        with torch.inference_mode(mode=False):
            self._gradients = [[block.tensor(place) for place in self.places] for block in blocks]
        self._all_dense = b"\1" * len(self.places)

    def sizes(self) -> tuple[int, ...]:
        """Of the parameters, and of this replica's gradients."""
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
            if total and flags == self._all_dense and all(map(is_dense, total)):  # as in most steps
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


class ThroughGroup:
    """Copies of the parameters in every replica, kept up to date and summed up through a process group."""

    def __init__(self, team: Team, number: int, leaves: Sequence[Tensor], kind: Kind) -> None:
        self.kind = kind
        self.team = team
        self.number = number
        self.leaves = list(leaves)
        self.places, _ = lay_out(leaves)
        self._published: list[bytes] | None = None

    def sizes(self) -> tuple[int, ...]:
        """Nothing is shared."""
        return ()

    def descriptors(self, replica: int) -> tuple[int, ...]:
        """See :class:`Collectives`."""
        del replica
        return ()

    def shipped(self) -> None:
        """See :class:`Collectives`."""

    def publish(self, *, training: bool) -> None:
        """Broadcast the parameters; in evaluation only those that are not what was broadcast last.

        Version counters are no proof that a parameter is unchanged (writes through ``.data`` bump none), so its
        content is: see :mod:`~evenly.team.fingerprints`.
        """
        published, now = self._published, None
        changed = list(range(len(self.leaves)))
        if not training:
            now = [fingerprint(leaf) for leaf in self.leaves]
            if published is not None:
                changed = [position for position in changed if now[position] != published[position]]
        self._published = None  # until they have arrived
        if changed:
            with self._collective(int(Command.BROADCAST), self.number, tuple(changed)) as group:
                for bucket in buckets([self.leaves[position].detach() for position in changed], BUCKET_BYTES):
                    group.broadcast(bucket)
        self._published = now

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
            # A replica that had nothing to run may still hold the gradients of a backward that failed elsewhere.
            bringing = tuple(replica for replica, flags in present.items() if flags)
            with self._collective(int(Command.REDUCE), self.number, bytes(wanted), bringing) as group:
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
            Exception: What a replica met instead of taking part.
        """
        team = self.team
        try:
            group = groups.group_of(team, self.kind)
            team.broadcast(team.size, *command)
            yield group
        except GroupError as error:
            reason = groups.why_not_together(team)
            team.spoil()
            if reason is None:
                raise
            try:
                raise reason from reason.__cause__ or error
            finally:
                del reason  # see [Note: raised later]
        except BaseException:
            team.spoil()  # a group that was left in the middle of something is of no use any more
            raise
