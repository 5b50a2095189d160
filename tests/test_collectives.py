"""Ways for parameters to get to the replicas and for gradients to get back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import assert_same, training, wrap


def batches(rows=(7, 3, 1, 5)):
    generator = torch.Generator().manual_seed(2)
    return [
        ((torch.randn(n, 6, generator=generator).double(),), torch.randn(n, 3, generator=generator).double())
        for n in rows
    ]


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("collectives", ["memory", "gloo"])
def test_training_is_the_same_over_every_transport(collectives) -> None:
    optimizers = [
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
    ]
    for optimizer in optimizers:
        assert_same(net, training(batches() * 5, F.mse_loss, optimizer), collectives=collectives)


@pytest.mark.parametrize("collectives", ["memory", "gloo"])
def test_several_forwards_before_a_backward(collectives) -> None:
    def loop(model):
        losses = [F.mse_loss(model(*args), target) for args, target in batches()]
        torch.stack(losses).sum().backward()
        return losses

    assert_same(net, loop, collectives=collectives)


@pytest.mark.parametrize("collectives", ["memory", "gloo"])
def test_parameters_written_without_a_trace_are_noticed_in_evaluation(collectives) -> None:
    (x,), _ = batches()[0]

    def loop(model):
        model.eval()
        seen = []
        with torch.no_grad():
            seen.append(model(x).clone())
            for parameter in model.parameters():
                parameter.data.mul_(0.5)  # bumps no version counter
            seen.append(model(x).clone())
            rows = model.get_parameter("0.weight").data
            rows.copy_(rows.flip(0))  # the same values elsewhere
            seen.append(model(x).clone())
        return seen

    assert_same(net, loop, collectives=collectives)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_mixed_dtypes_and_complex_parameters_over_gloo(dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, 3).to(dtype))
            self.b = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):
            y = x.to(dtype) @ self.a
            return (y.abs() if y.is_complex() else y).double() * self.b

    loop = training([((torch.randn(5, 3),), torch.randn(5, 3).double())], F.mse_loss)
    assert_same(Mixed, loop, collectives="gloo", tolerance=2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_unused_and_sparse_gradients_over_gloo() -> None:
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)
            self.used = nn.Linear(4, 2)
            self.unused = nn.Linear(4, 2)

        def forward(self, x):
            return self.used(self.words(x)).double()

    tokens = torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(0))

    def loop(model):
        loss = model(tokens).square().mean()
        loss.backward()
        return loss, model.get_parameter("words.weight").grad.to_dense()

    assert_same(Branches, loop, collectives="gloo")


def test_an_unknown_transport_is_named() -> None:
    (x,), _ = batches()[0]
    with pytest.raises(ValueError, match="'pigeon'"):
        wrap(net(), 2, collectives="pigeon")(x)
