"""Gradients that replicas hand over as soon as autograd has them: those of a megabyte and more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parity import assert_same, training, wrap

WIDE = 512  # 512 x 512 single-precision numbers are one megabyte


class Twice(nn.Module):
    """Uses one large weight in two places, each checkpointed."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda h: torch.tanh(self.shared(h)), x, use_reentrant=self.reentrant)
        return self.head(x)


def batches(rows: int = 5) -> list[tuple[tuple[Tensor], Tensor]]:
    torch.manual_seed(3)
    return [((torch.randn(rows, WIDE, requires_grad=True),), torch.randint(3, (rows,))) for _ in range(3)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_large_layer_trains_as_bare():
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 3))

    assert_same(make, training(batches(), F.cross_entropy, sgd))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_large_weight_whose_gradient_comes_in_parts(reentrant):
    assert_same(lambda: Twice(reentrant=reentrant), training(batches(), F.cross_entropy, sgd))


def test_large_gradients_add_up_over_backwards_of_one_graph():
    def loop(model: nn.Module) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    ((x,), y), *_ = batches()
    assert_same(lambda: nn.Linear(WIDE, WIDE), loop)


def test_a_large_embedding_with_sparse_and_dense_gradients():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDE, WIDE, sparse=True)

        def forward(self, index: Tensor) -> Tensor:
            return self.table(index) + self.table.weight.mean()

    def loop(model: nn.Module) -> Tensor:
        loss = model(torch.arange(5)).square().mean()
        loss.backward()
        return loss

    assert_same(Both, loop)


def test_a_frozen_large_layer_thaws():
    def loop(model: nn.Module) -> None:
        layer = getattr(model, "module", model)[0]
        for frozen in (True, False, True):
            layer.requires_grad_(not frozen)
            F.cross_entropy(model(x), y).backward()

    ((x,), y), *_ = batches()
    assert_same(lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)), loop)


def test_a_backward_that_failed_leaves_nothing_of_its_large_gradients():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if h.requires_grad and x.sum() > 1e6:
                h.register_hook(_refuse)
            return self.last(h)

    bare = Picky()
    model = wrap(Picky(), 2)
    model.module.load_state_dict(bare.state_dict())
    x = torch.randn(4, WIDE)
    bad = x.clone()
    bad[2:] = 1e6  # the last shard's backward fails, when the gradient of the last layer is there already
    with pytest.raises(ArithmeticError, match="refused"):
        model(bad).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    bare(x).sum().backward()
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def _refuse(gradient: Tensor) -> None:
    raise ArithmeticError("refused")
