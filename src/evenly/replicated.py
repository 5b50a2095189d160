"""The driver's module as its replicas know it: shipped once, followed in everything that changes afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evenly.surroundings import Surroundings
from evenly.team.buffers import Buffers
from evenly.team.collectives import Collectives, Kind
from evenly.team.generators import Generators
from evenly.team.memory import Placement
from evenly.team.protocol import DTYPE_NUMBER, Command, can_travel, encode, wire_forms
from evenly.team.shipping import LeafRegistry, ShippingError, pack
from evenly.team.transports import collectives_for
from evenly.watch import Changes, Watch

if TYPE_CHECKING:
    from evenly.team.team import Team


class Shipment:
    """A module in the replicas, as it was sent. They drop it when the last reference to this goes.

    A module is sent again when its structure changes, and an output from before may still be run backwards: its
    gradients lie where the earlier shipment has them.
    """

    def __init__(self, team: Team, number: int) -> None:
        weakref.finalize(self, team.release, team.generation, model=number).atexit = False


class Replicated:
    """A module whose parameters all replicas see in shared memory.

    Attributes:
        module: The user's own module, the source of truth.
        number: Its number in the replicas.
        leaves: Its parameters and other tensors that may require grad, in the order in which the replicas know them.
        leaf_ids: Their ids.
        trainable: Positions of those that require grad now.
        collectives: How parameters get to the replicas and gradients back.
        buffers: Its buffers, which are sent when they changed.
        generators: Its own random number generators, which the replicas' copies are seeded from.
        sync_batchnorm: Whether batch normalisation uses the statistics of the whole batch.
        shipment: What replicas hold of it; whoever has a graph of it to run backwards keeps it there.
        version: Counts the times it was shipped, or changed in more than numbers; whatever was learnt about an
            earlier version is void.
    """

    def __init__(
        self, module: nn.Module, team: Team, *, kind: Kind | None = None, sync_batchnorm: bool = False
    ) -> None:
        self.module = module
        self.sync_batchnorm = sync_batchnorm
        self.team = team
        self.number = 0
        self.version = 0
        self.leaves: list[Tensor] = []
        self.leaf_ids: frozenset[int] = frozenset()
        self.trainable: list[int] = []
        self.kind: Kind | None = kind
        self.collectives: Collectives | None = None
        self.buffers = Buffers(module)
        self.generators = Generators(module)
        self.shipment: Shipment | None = None
        self._generation = -1
        self._watch: Watch | None = None
        self._surroundings: Surroundings | None = None

    def sync(self) -> None:
        """Bring the replicas to the module's present state. The team must be ready, and locked."""
        watch, outside = self._watch, self._surroundings.changes() if self._surroundings is not None else None
        if watch is None or outside is None or self._generation != self.team.generation or not self.buffers.fits():
            self._ship()
            return
        changes = watch.changes()
        if changes.structure:
            self._ship()
        elif changes or outside:
            changes.surroundings = outside
            try:
                self._patch(watch, changes)
            except BaseException:
                self.forget()  # the surroundings count as followed
                raise

    def publish(self, *, training: bool) -> None:
        """Before a forward: let the replicas have the parameters as they are now."""
        assert self.collectives is not None  # noqa: S101 - it has been synchronised
        self.collectives.publish(training=training)

    def settle(self) -> None:
        """After a forward: what it set on the module stays as it is, in each replica for itself."""
        if self._watch is not None:
            self._watch.rebase_attributes()
        if self._surroundings is not None:
            self._surroundings.settle()

    def probed(self) -> None:
        """A replica tried a few rows on a copy of the module, which reads and writes the same global variables."""
        if self._surroundings is not None:
            self._surroundings.disturbed()

    # ------------------------------------------------------------------ shipping

    def _ship(self) -> None:
        team = self.team
        self.forget()
        _check_shapes(self.module)
        registry = LeafRegistry()
        parcel = pack(self.module, leaves=registry, name="model")
        leaves = list(registry)
        _check_leaves(self.module, leaves)
        team.phase = "taking over the module"
        self.number = number = team.reserve(1)
        collectives = collectives_for(team, number, leaves, self.kind)
        described = tuple(_describe(leaf, place) for leaf, place in zip(leaves, collectives.places, strict=True))
        specs, data = wire_forms(parcel.tensors)
        command = (int(Command.SHIP), number, parcel.payload, specs, described, collectives.kind, collectives.sizes())
        header = encode(command)
        for replica in range(1, team.size):
            if descriptors := collectives.descriptors(replica):
                team.send_descriptors(replica, number, descriptors)
            team.ask(replica, header, data)
        team.collect(range(1, team.size))
        collectives.shipped()
        self.leaves = leaves
        self.leaf_ids = frozenset(map(id, leaves))
        self.collectives = collectives
        self.trainable = [position for position, leaf in enumerate(leaves) if leaf.requires_grad]
        self.buffers = Buffers(self.module)
        self.generators = Generators(self.module)
        watch = Watch(self.module, leaves)
        self._surroundings = surroundings = Surroundings(self.module)
        if settings := surroundings.initial():
            self._patch(watch, Changes(surroundings=settings))
        self._watch = watch
        self._generation = team.generation
        self.shipment = Shipment(team, number)
        self.version += 1

    def forget(self) -> None:
        """Have the replicas drop the module, once no graph needs it."""
        self._watch = None
        self.shipment = None

    def _patch(self, watch: Watch, changes: Changes) -> None:
        team = self.team
        modules = {id(module): position for position, module in enumerate(self.module.modules())}
        registry = LeafRegistry(self.leaves)
        try:
            parcel = pack(changes, leaves=registry, known_modules=modules, name="changed attributes")
        except ShippingError:
            _name_obstacle(changes)
            raise
        if len(registry) != len(self.leaves):  # a new leaf tensor came in with an attribute
            _check_no_leaves(changes)
            self._ship()
            return
        team.phase = "following changes of the module"
        specs, data = wire_forms(parcel.tensors)
        header = encode((int(Command.PATCH), self.number, parcel.payload, specs))
        for replica in range(1, team.size):
            team.ask(replica, header, data)
        team.collect(range(1, team.size))
        values = chain((value for *_, value in changes.attributes), (change.value for change in changes.surroundings))
        if any(not isinstance(value, (int, float, Tensor)) or isinstance(value, bool) for value in values):
            self.version += 1  # an option, perhaps
        watch.rebase()
        self.generators = Generators(self.module)
        self.trainable = [position for position, leaf in enumerate(self.leaves) if leaf.requires_grad]


def _name_obstacle(changes: Changes) -> None:
    """Raise the error that names what outside of the module cannot be sent, if that is the obstacle."""
    for setting in changes.surroundings:
        try:
            pack(setting.value, name="its value")
        except ShippingError as error:
            message = f"forward may read {setting.place}, which was changed in this process only: {error}"
            raise ShippingError(message) from error


def _check_no_leaves(changes: Changes) -> None:
    for setting in changes.surroundings:
        registry = LeafRegistry()
        pack(setting, leaves=registry)
        if len(registry):
            message = (
                f"forward may read {setting.place}, which holds a tensor that requires grad and was changed in this "
                "process only: replicas that import it cannot share it. Make it a parameter of the module"
            )
            raise ValueError(message)


def _check_shapes(module: nn.Module) -> None:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            message = (
                f"{name} has no shape yet: run one batch through the bare module first, "
                "as lazy modules need before their parameters can be shared"
            )
            raise ValueError(message)


def _check_leaves(module: nn.Module, leaves: Sequence[Tensor]) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for leaf in leaves:
        name = names.get(id(leaf), "a tensor that the model refers to")
        if leaf.device.type != "cpu":
            how = ".to_empty(device='cpu') and give it values" if leaf.is_meta else ".cpu()"
            message = f"{name} is on {leaf.device}, but the replicas are on the CPU: move the model with {how}"
            raise ValueError(message)
        if not can_travel(leaf):
            message = f"{name} has layout {leaf.layout} and dtype {leaf.dtype}, which replicas cannot share"
            raise ValueError(message)


def _describe(leaf: Tensor, place: Placement) -> tuple[Any, ...]:
    return (
        place.offset,
        place.shape,
        place.stride,
        DTYPE_NUMBER[place.dtype],
        leaf.requires_grad,
        isinstance(leaf, torch.nn.Parameter),
    )
