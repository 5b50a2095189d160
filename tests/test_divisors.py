"""Means in `forward` over something that follows the rows only now and then: they are right, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import evenly
from evenly.probing import Outputs
from parity import REPLICAS, assert_same, compare, wrap

ROWS = 9
WIDTH = 3


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = values(ROWS, 4)
Y = values(ROWS, WIDTH, seed=1)
ALL = torch.ones(ROWS, WIDTH, dtype=torch.bool)
SOME = ALL.clone()
"""All of the rows that a probe looks at are selected."""
SOME[-3:] = False
SOME[-1, 0] = True


class Net(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        self.layer = nn.Linear(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.loss = loss
        self.double()

    def forward(self, x, y, mask):
        return self.loss(self, self.layer(x), y, mask)


def divided(numerator, denominator):
    return numerator / denominator


NOT_OVER_ROWS = {
    "mse_loss": lambda _, h, y, m: F.mse_loss(h[m], y[m]),
    "a module": lambda _, h, y, m: nn.SmoothL1Loss()(h[m], y[m]),
    "binary cross entropy": lambda _, h, y, m: F.binary_cross_entropy_with_logits(h[m], y[m].sigmoid()),
    "kl_div": lambda _, h, y, m: F.kl_div(h[m[:, 0]], y[m[:, 0]].softmax(1), reduction="batchmean"),
    "a mean": lambda _, h, y, m: (h - y).square()[m].mean(),
    "torch.mean": lambda _, h, y, m: torch.mean((h - y).square()[m]),
    "of rows": lambda _, h, y, m: (h - y).square()[m[:, 0]].mean(0).sum(),
    "nanmean": lambda _, h, y, m: (h - y).square().where(m, torch.nan).nanmean(),
    "beside a loss of all": lambda _, h, y, m: h.square().mean() + 0.1 * h[m].mean(),
    "times the rows": lambda _, h, y, m: F.mse_loss(h[m], y[m]) * len(h),
    "a sum over a count": lambda _, h, y, m: ((h - y).square() * m).sum() / m.sum(),
    "a sum over a number": lambda _, h, y, m: ((h - y).square() * m).sum() / max(1, int(m.sum())),
    "over a count, element by element": lambda _, h, y, m: ((h - y).square() * m / m.sum().clamp(min=1)).sum(),
    "times a reciprocal": lambda _, h, y, m: ((h - y).square() * m).sum() * (1 / m.double().sum()),
    "in place": lambda _, h, y, m: (h[m] - y[m]).square().sum().div_(m.sum()),
    "a vector": lambda _, h, y, m: (h - y).square()[m[:, 0]].mean(0),
    "one of two": lambda _, h, y, m: {"loss": h.square().mean(), "error": (h - y).abs()[m].mean().detach()},
    "a Python number": lambda _, h, y, m: (h.square().mean(), (h - y).abs()[m].mean().item()),
    "on some replicas": lambda _, h, y, m: F.mse_loss(h[m], y[m]) if bool(m.any()) else h.sum() * 0,
}  # fmt: skip


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NOT_OVER_ROWS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_mean_over_selected_elements_is_right_while_all_are_selected_and_refused_afterwards(name, replicas, train):
    torch.manual_seed(0)
    bare = Net(NOT_OVER_ROWS[name])
    bare.loss = None
    model = wrap(bare, replicas).train(train)
    bare.loss = NOT_OVER_ROWS[name]
    with torch.set_grad_enabled(train):
        for _ in range(2):
            compare(model(X, Y, ALL), bare(X, Y, ALL))
            with pytest.raises(ValueError, match=r"(?s)^output.* divides .*evenly\.whole_batch"):
                model(X, Y, SOME)


def test_the_error_names_the_output_the_line_and_what_each_replica_divided_by():
    def loss(_, h, y, m):
        return {"loss": F.mse_loss(h[m], y[m])}

    line = loss.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf'output\["loss"\] .* line {line} .* 15 on replica 0 \(5 rows\), 4 on'):
        wrap(Net(loss), 2)(X, Y, SOME)


OVER_ROWS = {
    "what it says to do": lambda _, h, y, m: (
        F.mse_loss(h[m], y[m], reduction="sum") / evenly.whole_batch(m.sum())
    ),
    "a statistic that is not returned": lambda n, h, y, m: (n.seen(h.detach()[m].mean()), h.square().mean())[1],
    "a statistic of the loss": lambda n, h, y, m: (
        loss := (h - y).square(), n.seen(loss.detach()[m].mean()), loss.sum() / loss.numel()
    )[-1],
    "a weight": lambda n, h, y, m: h.square().mean() + 0.1 * n.layer.weight.abs().mean() / n.layer.bias.square().sum(),
    "normalisation of features": lambda n, h, y, m: n.norm(h / h.norm(dim=1, keepdim=True)).mean(1).square().mean(),
    "by hand": lambda _, h, y, m: ((h - h.mean(1, keepdim=True)) / h.var(1, keepdim=True)).square().sum(),
    "in a loop": lambda _, h, y, m: torch.stack([F.mse_loss(a, b) for a, b in zip(h, y, strict=True)]).mean(),
    "in a loop, added up": lambda _, h, y, m: sum((a - b).square().mean() for a, b in zip(h, y, strict=True)),
    "in a loop, of selected elements": lambda _, h, y, m: torch.stack(
        [(a - b).square()[:1 + int(c.sum())].mean() for a, b, c in zip(h, y, m, strict=True)]
    ).mean(),
    "in a loop, over counts": lambda _, h, y, m: sum(
        (a * c).square().sum() / (1 + c.sum()) for a, c in zip(h, m, strict=True)
    ) / len(h),
    "a sum of selected elements": lambda _, h, y, m: F.mse_loss(h[m], y[m], reduction="sum"),
    "rows": lambda _, h, y, m: h / m.sum(1, keepdim=True).clamp(min=1) / 3,
    "mapped": lambda _, h, y, m: torch.vmap(lambda a, b: F.mse_loss(a, b) / (1 + b.square().sum()))(h, y).mean(),
    "scaled by a given number": lambda _, h, y, m: h.square().mean() / 7 + h.sum() / 5 / len(h),
}  # fmt: skip


class Seeing(Net):
    def seen(self, value):
        self.last = float(value)


@pytest.mark.parametrize("name", OVER_ROWS)
def test_a_mean_that_follows_the_rows_is_not_refused_for_other_means_in_forward(name):
    for train in (True, False):

        def loop(model, train=train):
            model.train(train)
            found = []
            for mask in (ALL, SOME, ~SOME, SOME):
                with torch.set_grad_enabled(train):
                    found.append(model(X, Y, mask))
                if train:
                    found[-1].square().sum().backward()
            return found

        assert_same(lambda: Seeing(OVER_ROWS[name]), loop)


def test_random_layers_do_not_hide_that_a_statistic_is_none_of_the_loss():
    class Random(Seeing):
        def forward(self, x, y, mask):
            h = F.dropout(self.layer(x), 0.5, self.training)
            self.seen(h[mask].detach().mean())
            return (h - y).square().mean()

    model = wrap(Random(None), 2)
    for mask in (ALL, SOME):
        model(X, Y, mask).backward()


def test_what_was_found_out_about_a_statistic_is_remembered(monkeypatch):
    probes = []
    refuted = Outputs._refuted
    monkeypatch.setattr(Outputs, "_refuted", lambda *args: probes.append(1) or refuted(*args))
    model = wrap(Seeing(OVER_ROWS["a statistic of the loss"]), 2)
    for _ in range(5):
        model(X, Y, SOME)
    assert len(probes) == 1


def test_after_a_refusal_nothing_is_half_done():
    model = wrap(Net(NOT_OVER_ROWS["mse_loss"]), 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="whole_batch"):
            model(X, Y, SOME)
    model(X, Y, ALL).backward()
    bare = Net(NOT_OVER_ROWS["mse_loss"])
    bare.load_state_dict(model.state_dict())
    bare(X, Y, ALL).backward()
    compare(model.module.layer.weight.grad, bare.layer.weight.grad)


def test_what_the_user_says_of_a_number_is_so():
    model = wrap(Net(NOT_OVER_ROWS["mse_loss"]), 2, scalar_outputs="stack")
    assert model(X, Y, SOME).shape == (2,)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_selection_that_is_as_large_on_replicas_with_other_numbers_of_rows_is_refused(replicas):
    model = wrap(Net(lambda _, h, y, m: ((h - y).square() * m).sum() / m.sum()), replicas)
    chosen = torch.zeros(5, 1, dtype=torch.bool)
    chosen[[0, 3] if replicas == 2 else [0, 2, 4]] = True  # of 3 + 2, or of 2 + 2 + 1 rows: one on each replica
    model(X[:5], Y[:5], torch.ones_like(chosen))
    with pytest.raises(ValueError, match="does not follow the rows"):
        model(X[:5], Y[:5], chosen)


def test_a_divisor_that_changes_from_call_to_call_and_has_nothing_to_do_with_rows():
    def loop(model):
        return [model(X[:5], Y[:5], number) for number in (2.0, 3.0, 7, torch.tensor(0.5))]

    assert_same(lambda: Net(lambda _, h, y, number: F.mse_loss(h, y) / number), loop)
