"""Losses outside of the model are those of the whole batch, in value and gradient, however rows and labels fall."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import assert_same

CLASSES = 5
REDUCTIONS = ("mean", "sum", "none")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def values(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def labels(*shape, seed=0):
    return torch.randint(CLASSES, shape, generator=generator(seed))


def check(loss, targets, *, rows=7, shape=(CLASSES,), dtype=torch.float32, **options):
    """One loss over the outputs of a linear layer; its value, and the gradient of its mean."""

    def make():
        return nn.Sequential(nn.Linear(3, torch.Size(shape).numel()), nn.Unflatten(1, shape)).to(dtype)

    def loop(model):
        value = loss(model(values(rows, 3, seed=9).to(dtype)), targets, **options)
        value.mean().backward()
        return value

    assert_same(make, loop)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("targets", ["labels", "ignored labels", "a shard of ignored labels", "soft labels"])
def test_cross_entropy(reduction, weighted, smoothing, targets):
    weight = torch.rand(CLASSES, generator=generator(3)) + 0.5 if weighted else None
    target = {
        "labels": labels(7),
        "ignored labels": labels(7).masked_fill(torch.arange(7) % 3 == 0, -100),
        "a shard of ignored labels": labels(7).masked_fill(torch.arange(7) >= 4, -100),
        "soft labels": values(7, CLASSES, seed=1).softmax(1),
    }[targets]
    check(F.cross_entropy, target, reduction=reduction, weight=weight, label_smoothing=smoothing)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_of_tokens_and_pixels(reduction):
    def tokens(logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction=reduction)

    check(tokens, labels(7, 4), shape=(4, CLASSES))
    pixels = functools.partial(F.cross_entropy, ignore_index=0, reduction=reduction)
    check(pixels, labels(7, 3, 2), shape=(CLASSES, 3, 2))
    check(pixels, labels(7, 4), shape=(CLASSES, 4))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class weights"])
def test_nll(reduction, weighted):
    weight = torch.rand(CLASSES, generator=generator(3)) + 0.5 if weighted else None

    def loss(logits, target, **options):
        return F.nll_loss(logits.log_softmax(1), target, **options)

    check(loss, labels(7), reduction=reduction, weight=weight, ignore_index=1)


def test_nothing_but_ignored_labels_at_all():
    def loop(model):
        value = F.cross_entropy(model(values(5, 3)), torch.full((5,), -100))
        value.backward()
        return value

    assert_same(lambda: nn.Linear(3, CLASSES), loop)


ELEMENTWISE = {
    "mse": (F.mse_loss, values(7, CLASSES, seed=1)),
    "l1": (F.l1_loss, values(7, CLASSES, seed=1)),
    "smooth l1": (functools.partial(F.smooth_l1_loss, beta=0.5), values(7, CLASSES, seed=1)),
    "huber": (functools.partial(F.huber_loss, delta=0.7), values(7, CLASSES, seed=1)),
    "soft margin": (F.soft_margin_loss, values(7, CLASSES, seed=1).sign()),
    "bce": (lambda x, y, **o: F.binary_cross_entropy(x.sigmoid(), y, **o), torch.rand(7, CLASSES)),
    "bce, weighted": (
        lambda x, y, **o: F.binary_cross_entropy(x.sigmoid(), y, weight=torch.arange(1.0, CLASSES + 1), **o),
        torch.rand(7, CLASSES),
    ),
    "bce with logits": (F.binary_cross_entropy_with_logits, torch.rand(7, CLASSES)),
    "bce with logits, pos_weight": (
        functools.partial(F.binary_cross_entropy_with_logits, pos_weight=torch.arange(1.0, CLASSES + 1)),
        torch.rand(7, CLASSES),
    ),
    "bce with logits, weights of rows": (
        functools.partial(F.binary_cross_entropy_with_logits, weight=torch.arange(1.0, 8)[:, None]),
        torch.rand(7, CLASSES),
    ),
    "kl_div": (lambda x, y, **o: F.kl_div(x.log_softmax(1), y, **o), values(7, CLASSES, seed=1).softmax(1)),
    "kl_div of logarithms": (
        lambda x, y, **o: F.kl_div(x.log_softmax(1), y, log_target=True, **o),
        values(7, CLASSES, seed=1).log_softmax(1),
    ),
    "poisson nll": (F.poisson_nll_loss, torch.rand(7, CLASSES)),
    "gaussian nll": (
        lambda x, y, **o: F.gaussian_nll_loss(x, y, torch.full((7, 1), 0.5), **o),
        values(7, CLASSES, seed=1),
    ),
    "hinge embedding": (F.hinge_embedding_loss, values(7, CLASSES, seed=1).sign()),
    "multilabel soft margin": (F.multilabel_soft_margin_loss, torch.rand(7, CLASSES).round()),
    "multilabel margin": (F.multilabel_margin_loss, torch.stack([torch.randperm(CLASSES) for _ in range(7)])),
    "multi margin": (F.multi_margin_loss, labels(7)),
    "triplet": (lambda x, y, **o: F.triplet_margin_loss(x, y, y.flip(0), **o), values(7, CLASSES, seed=1)),
    "cosine embedding": (
        lambda x, y, **o: F.cosine_embedding_loss(x, values(7, CLASSES, seed=2), y, **o),
        values(7, seed=3).sign(),
    ),
    "margin ranking": (
        lambda x, y, **o: F.margin_ranking_loss(x[:, 0], x[:, 1], y, **o),
        values(7, seed=3).sign(),
    ),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_losses_of_elements(name, reduction):
    loss, target = ELEMENTWISE[name]
    check(loss, target, reduction=reduction)


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "bce with logits", "kl_div"])
def test_losses_of_elements_in_double_precision(name):
    loss, target = ELEMENTWISE[name]
    check(loss, target.double(), dtype=torch.float64)


def test_kl_div_by_the_size_of_the_batch():
    loss, target = ELEMENTWISE["kl_div"]
    check(loss, target, reduction="batchmean")


def test_ctc():
    def loss(logits, target):
        lengths = torch.full((7,), 6)
        return F.ctc_loss(logits.log_softmax(2).transpose(0, 1), target, lengths, torch.full((7,), 2))

    check(loss, torch.randint(1, CLASSES, (7, 2)), shape=(6, CLASSES))


def test_every_loss_of_torch_is_tried():
    tried = set(inspect.getsource(inspect.getmodule(test_ctc)).replace("(", " ").replace(",", " ").split())
    losses = {name for name in dir(F) if name.endswith("_loss") and not name.startswith("_")}
    losses |= {"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
    missing = {name for name in losses if f"F.{name}" not in tried}
    assert missing <= {"triplet_margin_with_distance_loss", "_canonical_mask"}


def test_losses_as_modules_weights_of_rows_and_sums_of_losses():
    def loop(model):
        output = model(values(7, 3))
        weights = torch.arange(1.0, 8)
        per_row = nn.CrossEntropyLoss(reduction="none")(output, labels(7))
        loss = (
            (per_row * weights).sum() / weights.sum()
            + 0.1 * output.square().mean()
            + 0.5 * nn.L1Loss()(output, values(7, CLASSES, seed=4))
        )
        loss.backward()
        return per_row, loss

    assert_same(lambda: nn.Linear(3, CLASSES), loop)


def test_losses_between_rows():
    def contrastive(features):
        normal = F.normalize(features, dim=1)
        return F.cross_entropy(normal @ normal.t() / 0.1, torch.arange(7).roll(1))

    def covariance(features):
        centred = features - features.mean(0)
        return (centred.t() @ centred / 6).square().sum() + features.std(0).mean()

    def distances(features):
        return F.pairwise_distance(features, features.flip(0)).mean() + torch.cdist(features, features).mean()

    for loss in (contrastive, covariance, distances):

        def loop(model, loss=loss):
            value = loss(model(values(7, 3)))
            value.backward()
            return value

        # Without a bias, which cancels out of differences: its gradient is nothing but rounding.
        assert_same(lambda: nn.Linear(3, CLASSES, bias=False), loop)


def test_labels_that_come_out_of_the_model_too():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, CLASSES)

        def forward(self, x, y):
            return self.layer(x), y.roll(1, 1)

    def loop(model):
        logits, target = model(values(7, 4, 3), labels(7, 4))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        return loss

    assert_same(Both, loop)


def test_metrics():
    def loop(model):
        with torch.no_grad():
            output = model(values(7, 3))
            right = output.argmax(1) == labels(7)
            top = output.topk(2).indices
            return (
                right.sum().item(), right.float().mean().item(), (top == labels(7)[:, None]).any(1).sum().item(),
                output.softmax(1).max(1).values, len(output), output.numpy().sum().item(), output.tolist(),
            )  # fmt: skip

    assert_same(lambda: nn.Linear(3, CLASSES), loop)
