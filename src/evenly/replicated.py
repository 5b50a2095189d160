"""The driver's module as its replicas know it: shipped once, followed in everything that changes afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenly.team.buffers import Buffers
from evenly.team.memory import Block, Placement, lay_out
from evenly.team.protocol import DTYPE_NUMBER, Command, can_travel, encode, wire_forms
from evenly.team.shipping import LeafRegistry, Parcel, pack
from evenly.watch import DELETED, Changes, Watch

if TYPE_CHECKING:
    from evenly.team.team import Team


class Replicated:
    """A module whose parameters all replicas see in shared memory.

    Attributes:
        module: The user's own module, the source of truth.
        number: Its number in the replicas.
        leaves: Its parameters and other tensors that may require grad, in the order in which the replicas know them.
        trainable: Positions of those that require grad now.
        gradients: Per replica 1..n-1, per leaf, where that replica lays its gradient.
        buffers: Its buffers, which are sent when they changed.
        sync_batchnorm: Whether batch normalisation uses the statistics of the whole batch.
        version: Counts the times it was shipped; whatever was learnt about an earlier version is void.
    """

    def __init__(self, module: nn.Module, team: Team, *, sync_batchnorm: bool = False) -> None:
        self.module = module
        self.sync_batchnorm = sync_batchnorm
        self.team = team
        self.number = 0
        self.version = 0
        self.leaves: list[Tensor] = []
        self.trainable: list[int] = []
        self.gradients: list[list[Tensor]] = []
        self.buffers = Buffers(module)
        self._generation = -1
        self._watch: Watch | None = None
        self._forget: weakref.finalize[..., Any] | None = None

    def sync(self) -> None:
        """Bring the replicas to the module's present state. The team must be ready, and locked."""
        watch = self._watch
        if watch is None or self._generation != self.team.generation or not self.buffers.fits():
            self._ship()
            return
        changes = watch.changes()
        if not changes:
            return
        if changes.structure:
            self._ship()
        else:
            self._patch(watch, changes)

    def settle(self) -> None:
        """After a forward: what it set on the module stays as it is, in each replica for itself."""
        if self._watch is not None:
            self._watch.rebase_attributes()

    # ------------------------------------------------------------------ shipping

    def _ship(self) -> None:
        team = self.team
        self.forget()
        registry = LeafRegistry()
        parcel = pack(self.module, leaves=registry, name="model")
        leaves = list(registry)
        _check_leaves(self.module, leaves)
        team.phase = "taking over the module"
        parameters, places = _share(leaves)
        gradients = [Block.allocate(parameters.size) for _ in range(1, team.size)]
        self.number = number = team.reserve(1)
        described = tuple(_describe(leaf, place) for leaf, place in zip(leaves, places, strict=True))
        specs, data = wire_forms(parcel.tensors)
        header = encode(
            (int(Command.SHIP), number, parcel.payload, specs, described, (parameters.size, parameters.size))
        )
        for replica, block in enumerate(gradients, 1):
            team.send_descriptors(replica, number, (parameters.descriptor, block.descriptor))
            team.ask(replica, header, data)
        team.collect(range(1, team.size))
        self.leaves = leaves
        self.gradients = [[block.tensor(place) for place in places] for block in gradients]
        for block in (parameters, *gradients):
            block.close()
        self.trainable = [position for position, leaf in enumerate(leaves) if leaf.requires_grad]
        self.buffers = Buffers(self.module)
        self._watch = Watch(self.module, leaves)
        self._generation = team.generation
        self._forget = weakref.finalize(self, team.release, team.generation, model=number)
        self._forget.atexit = False
        self.version += 1

    def forget(self) -> None:
        """Have the replicas drop the module."""
        self._watch = None
        if self._forget is not None:
            self._forget()
            self._forget = None

    def _patch(self, watch: Watch, changes: Changes) -> None:
        team = self.team
        parcel = Parcel(b"")
        if changes.attributes:
            modules = {id(module): position for position, module in enumerate(self.module.modules())}
            values = [
                (position, name, value is DELETED, None if value is DELETED else value)
                for position, name, value in changes.attributes
            ]
            registry = LeafRegistry(self.leaves)
            parcel = pack(values, leaves=registry, known_modules=modules, name="changed attributes")
            if len(registry) != len(self.leaves):  # a new leaf tensor came in with an attribute
                self._ship()
                return
        team.phase = "following changes of the module"
        specs, data = wire_forms(parcel.tensors)
        training = None if changes.training is None else tuple(changes.training)
        flags = tuple((position, flag) for position, flag in changes.requires_grad)
        command = (int(Command.PATCH), self.number, training, flags, parcel.payload or None, specs)
        header = encode(command)
        for replica in range(1, team.size):
            team.ask(replica, header, data)
        team.collect(range(1, team.size))
        watch.rebase()
        self.trainable = [position for position, leaf in enumerate(self.leaves) if leaf.requires_grad]


def _check_leaves(module: nn.Module, leaves: Sequence[Tensor]) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for leaf in leaves:
        name = names.get(id(leaf), "a tensor that the model refers to")
        if isinstance(leaf, nn.parameter.UninitializedTensorMixin):
            message = (
                f"{name} has no shape yet: run one batch through the bare module first, "
                "as lazy modules need before their parameters can be shared"
            )
            raise ValueError(message)  # noqa: TRY004 - it is the state of the value that is wrong
        if not can_travel(leaf):
            message = f"{name} has layout {leaf.layout} and dtype {leaf.dtype}, which replicas cannot share"
            raise ValueError(message)
        if leaf.device.type != "cpu":
            message = f"{name} is on {leaf.device}, but the replicas are on the CPU: move the model with .cpu()"
            raise ValueError(message)


def _share(leaves: Sequence[Tensor]) -> tuple[Block, list[Placement]]:
    """Move the storage of leaves into shared memory. The objects stay the same, so optimizers keep working."""
    places, size = lay_out(leaves)
    block = Block.allocate(size)
    for leaf, place in zip(leaves, places, strict=True):
        shared = block.tensor(place)
        shared.copy_(leaf.detach())
        leaf.data = shared
    return block, places


def _describe(leaf: Tensor, place: Placement) -> tuple[Any, ...]:
    return (
        place.offset,
        place.shape,
        place.stride,
        DTYPE_NUMBER[place.dtype],
        leaf.requires_grad,
        isinstance(leaf, torch.nn.Parameter),
    )
