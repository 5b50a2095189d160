"""Random number generators that a model keeps for itself, or is given."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from parity import REPLICAS, wrap

KINDS = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: float(torch.rand((), generator=g))),
    "python": (random.Random, lambda g: g.random()),
    "numpy": (np.random.default_rng, lambda g: float(g.random())),
    "numpy, legacy": (np.random.RandomState, lambda g: float(g.random_sample())),
}
PLACES = ["an attribute", "a list", "a dict of a submodule", "an argument"]


class Noisy(nn.Module):
    """Gives every row a number from a generator of the model's own."""

    def __init__(self, kind, place):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        make, self.draw = KINDS[kind]
        self.place = place
        self.gen = make(3) if place == "an attribute" else None
        self.gens = [make(3)] if place == "a list" else []
        self.layer.gens = {"a": make(3)} if place == "a dict of a submodule" else {}

    def own(self):
        return self.gen or next(iter([*self.gens, *self.layer.gens.values()]), None)

    def forward(self, x, generator=None):
        generator = generator or self.own()
        return x * 0 + torch.tensor([[self.draw(generator)] for _ in range(len(x))])


def runs(model, count, generator=None):
    given = () if generator is None else (generator,)
    return [model(torch.ones(5, 1), *given).full_tensor().flatten().tolist() for _ in range(count)]


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_row_and_every_call_gets_numbers_of_its_own_and_the_same_seed_gives_the_same(kind, place, replicas):
    def numbers():
        model = wrap(Noisy(kind, place), replicas)
        return runs(model, 3, KINDS[kind][0](3) if place == "an argument" else None)

    first = numbers()
    assert len({number for row in first for number in row}) == 15
    assert numbers() == first


@pytest.mark.parametrize("kind", KINDS)
def test_replica_0_draws_from_the_drivers_own_as_the_bare_module_does(kind):
    make, draw = KINDS[kind]
    model = wrap(Noisy(kind, "an attribute"))
    (first,) = runs(model, 1)
    expected = make(3)
    assert first[:3] == pytest.approx([draw(expected) for _ in range(3)])
    assert draw(model.module.gen) == draw(expected)


def test_a_run_goes_on_from_a_saved_state_and_a_new_generator_counts():
    model = wrap(Noisy("torch", "an attribute"))
    runs(model, 2)
    state = model.module.gen.get_state()
    expected = runs(model, 2)
    model.module.gen.set_state(state)
    assert runs(model, 2) == expected
    model.module.gen = torch.Generator()
    model.module.gen.set_state(state)
    assert runs(model, 2) == expected
    model.module.gen.manual_seed(9)
    assert runs(model, 2) != expected
