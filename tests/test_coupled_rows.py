"""Models whose rows depend on one another cannot be dealt out, and say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import REPLICAS, assert_same, training, wrap


class Coupled(nn.Module):
    """Mixes rows, in some modes."""

    def __init__(self, mix, modes=(True, False), norm=None):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = norm or nn.Identity()
        self.mix, self.modes = mix, modes

    def forward(self, x, y=None):
        if self.training in self.modes:
            x = self.mix(x)
        out = self.norm(self.linear(x))
        return out if y is None else F.mse_loss(out, y)


MIXES = [
    lambda x: 0.7 * x + 0.3 * x.flip(0),
    lambda x: x - x.mean(0),
    lambda x: (x @ x.T).softmax(-1) @ x,
]


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("modes", [(True,), (False,), (True, False)], ids=["training", "evaluation", "always"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("norm", [None, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3))])
def test_mixing_rows_is_refused_in_the_mode_in_which_it_happens(replicas, modes, mix, norm) -> None:
    model = wrap(Coupled(mix, modes, norm and norm()), replicas)
    x, y = torch.randn(8, 3), torch.randn(8, 4)
    for mode in (True, False):
        model.train(mode)
        for arguments in ((x,), (x, y)):
            if mode in modes:
                with pytest.raises(ValueError, match="cannot be joined"):
                    model(*arguments)
            else:
                model(*arguments)


def test_batch_normalisation_and_dropout_alone_are_no_mixing() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    assert wrap(module, 2)(torch.randn(8, 3)).shape == (8, 2)


def test_a_model_that_mixes_nothing_is_not_refused_for_rounding() -> None:
    def deep():
        return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(12)])

    assert_same(deep, training([((torch.randn(7, 16),), torch.randn(7, 16))], F.mse_loss), tolerance=1e-3)
