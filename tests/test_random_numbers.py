"""Random numbers: the same seed gives the same run, and every shard gets its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from evenly import DataParallel


class Noisy(nn.Module):
    """Returns what torch, Python and NumPy draw for each row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        drawn = [[torch.rand(()).item(), random.random(), np.random.rand()] for _ in x]  # noqa: NPY002
        return self.weight * torch.tensor(drawn, dtype=torch.float64)


@pytest.fixture(scope="module")
def team():
    """Starting replicas takes seconds: they live as long as this file runs."""
    model = DataParallel(Noisy(), device_ids=["cpu"] * 3)
    yield
    del model


@pytest.fixture
def noisy(team):
    return DataParallel(Noisy(), device_ids=["cpu"] * 3, out_dims=0)


X = torch.zeros(6, 1)


def draw(model, times=2):
    return torch.cat([model(X).full_tensor().detach() for _ in range(times)])


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def test_the_same_seed_gives_the_same_numbers_bit_for_bit(noisy):
    seed(1)
    first = draw(noisy)
    seed(1)
    assert torch.equal(draw(noisy), first)
    seed(2)
    assert not torch.equal(draw(noisy), first)


def test_every_row_gets_numbers_of_its_own(noisy):
    drawn = draw(noisy)
    for column in drawn.T:
        assert len(column.unique()) == len(drawn)


def test_each_generator_follows_only_its_own_seed(noisy):
    seed(1)
    first = draw(noisy)
    for column, generator in enumerate([torch.manual_seed, random.seed, np.random.seed]):
        seed(2)
        generator(1)
        drawn = draw(noisy)
        for other in range(3):
            assert torch.equal(drawn[:, other], first[:, other]) == (other == column)


def test_a_run_goes_on_from_a_saved_state(noisy):
    seed(3)
    draw(noisy)
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    wanted = draw(noisy)
    draw(noisy)
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    np.random.set_state(saved[2])  # noqa: NPY002
    assert torch.equal(draw(noisy), wanted)


def test_the_driver_draws_what_it_would_draw_alone(noisy):
    seed(4)
    wanted = noisy.module(X[:2])
    seed(4)
    assert torch.equal(noisy(X).full_tensor()[:2], wanted)


def test_dropout_masks_differ_between_shards(team):
    model = DataParallel(nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5)), device_ids=["cpu"] * 3)
    masks = model(torch.ones(3, 1)).full_tensor() == 0
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
