"""A replica's copy of a module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenly.team.buffers import Buffers
from evenly.team.collectives import Kind
from evenly.team.generators import Generators
from evenly.team.holding import Holding


@dataclass
class Model:
    """A replica's copy of a module.

    Attributes:
        module: The module.
        kind: The transport of its parameters.
        holding: Its parameters, and where their gradients go.
        buffers: Its buffers, whose values come from the driver.
        generators: Its random number generators, which are seeded from the driver's.
    """

    module: torch.nn.Module
    kind: Kind
    holding: Holding
    buffers: Buffers
    generators: Generators

    @property
    def leaves(self) -> list[Tensor]:
        """Its parameters and other leaf tensors that may require grad, in the driver's order."""
        return self.holding.leaves
