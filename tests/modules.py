"""Small models and values that tests share."""

from __future__ import annotations

import torch
from torch import nn


def rows(count, *shape, seed=0):
    """Random rows, of three numbers each if nothing else is said."""
    return torch.randn(count, *(shape or (3,)), generator=torch.Generator().manual_seed(seed))


def bare(model):
    """The module, wrapped or not."""
    return getattr(model, "module", model)


class Calls(nn.Module):
    """Runs a function of its layer and its arguments."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self.layer, *args, **kwargs)


class Forward(nn.Module):
    """A layer, and a forward of the test's own, which is given the module."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.run = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)
