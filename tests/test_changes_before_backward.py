"""What a backward finds when the module has changed since its forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parity import assert_same


def rows(count, width=3, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bare(model):
    return getattr(model, "module", model)


@pytest.mark.parametrize("collectives", ["memory", "gloo"])
@pytest.mark.parametrize("change", ["a hook", "a layer", "a frozen part", "the mode", "an attribute"])
def test_a_backward_after_the_module_has_changed(change, collectives):
    """The gradients of an output are those of the module that made it, whatever it has become since."""

    def loop(model):
        module = bare(model)
        head = module[2]
        first = model(rows(5, 3))
        penalty = torch.autograd.grad(model(rows(5, 3)).square().sum(), head.weight, create_graph=True)[0]
        if change == "a hook":
            module[0].register_forward_hook(lambda layer, args, output: output * 2)
        elif change == "a layer":
            module[2] = nn.Linear(4, 2).double()
            nn.init.constant_(module[2].weight, 0.5)
            nn.init.constant_(module[2].bias, 0.0)
        elif change == "a frozen part":
            module[0].requires_grad_(requires_grad=False)
        elif change == "the mode":
            model.eval()
        else:
            module[0].scale = [1.0]
        second = model(rows(7, 3, seed=1))
        (first.square().mean() + second.mean() + penalty.square().sum()).backward()
        third = model(rows(3, 3, seed=2))
        third.exp().sum().backward()
        return first, second, third, head.weight.grad

    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    assert_same(make, loop, collectives=collectives)
