"""Means inside of `forward` that are over something other than rows: valid tokens, weights of classes and elements."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import REPLICAS, assert_same, wrap

CLASSES = 5
ROWS = 8


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape):
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))


IGNORED = labels(ROWS).masked_fill(torch.arange(ROWS) < 3, -100)
"""The first replica has next to no label, the last nothing but."""
WEIGHTS = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
WEIGHTS *= torch.arange(ROWS, dtype=torch.float64)[:, None] ** 2
CLASS_WEIGHTS = torch.tensor([0.1, 2.0, 0.5, 1.0, 4.0], dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)
        self.loss = loss
        self.double()

    def forward(self, x, *args):
        return self.loss(self.layer(x), *args)


def check(loss, *args, mean=True, **options):
    """Its value and gradients, alone and beside an ordinary mean (or sum); the targets are arguments of `forward`."""

    def beside(h, *args):
        return 0.3 * loss(h, *args) + (h.square().mean() if mean else h.square().sum())

    for function in (loss, beside):

        def loop(model):
            value = model(values(ROWS, 3, seed=4), *args)
            value.backward()
            return value

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(size_average|elementwise_mean|options).*")
            assert_same(lambda function=function: Net(function), loop, **options)


def log_softmax(loss):
    return lambda h, y, *args, **options: loss(h.log_softmax(1), y, *args, **options)


def with_options(h, y):
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions()
    return F.linear_cross_entropy(h, values(CLASSES, CLASSES), y, options=options)


OF_LABELS = {
    "size_average": lambda h, y: F.cross_entropy(h, y, size_average=True),
    "reduce": lambda h, y: F.cross_entropy(h, y, reduce=True, reduction="sum"),
    "size_average, by position": lambda h, y: F.cross_entropy(h, y, CLASS_WEIGHTS, True, -100, True),
    "no average": lambda h, y: F.cross_entropy(h, y, size_average=False),
    "not reduced": lambda h, y: F.cross_entropy(h, y, reduce=False).square().sum(),
    "elementwise_mean": lambda h, y: F.cross_entropy(h, y, reduction="elementwise_mean"),
    "a module, size_average": lambda h, y: nn.CrossEntropyLoss(CLASS_WEIGHTS, size_average=True)(h, y),
    "a module, reduce": lambda h, y: nn.CrossEntropyLoss(reduce=True, label_smoothing=0.2)(h, y),
    "nll, size_average": log_softmax(lambda h, y: F.nll_loss(h, y, size_average=True)),
    "nll, by position": log_softmax(lambda h, y: F.nll_loss(h, y, CLASS_WEIGHTS, True, -100, None)),
    "nll, a module": log_softmax(lambda h, y: nn.NLLLoss(CLASS_WEIGHTS, size_average=True)(h, y)),
    "nll, another ignored label": log_softmax(lambda h, y: F.nll_loss(h, y.clamp(min=0), ignore_index=0)),
    "one label for all": lambda h, y: F.cross_entropy(h, y, weight=CLASS_WEIGHTS, ignore_index=-100),
    "the operator": lambda h, y: torch.ops.aten.cross_entropy_loss(h, y, CLASS_WEIGHTS),
    "the operator's overload": lambda h, y: torch.ops.aten.cross_entropy_loss.default(h, y, None, 1, -100, 0.1),
    "the builtin": lambda h, y: torch._C._nn.cross_entropy_loss(h, y, CLASS_WEIGHTS, 1, -100, 0.0),
    "the builtin, nll": log_softmax(lambda h, y: torch._C._nn.nll_loss(h, y, None, 1)),
    "the builtin, not reduced": lambda h, y: torch._C._nn.cross_entropy_loss(h, y).sum(),
    "of selected rows": lambda h, y: F.cross_entropy(h[y >= 0], y[y >= 0]),
}


@pytest.mark.parametrize("name", OF_LABELS)
def test_losses_of_labels_however_they_are_called(name):
    check(OF_LABELS[name], IGNORED, mean=not name.endswith(("no average", "not reduced")))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has none")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_layer_and_its_cross_entropy_in_one(reduction):
    matrix = values(CLASSES, CLASSES, seed=7)

    def loss(h, y):
        return F.linear_cross_entropy(
            h, matrix, y, linear_bias=CLASS_WEIGHTS, weight=CLASS_WEIGHTS, reduction=reduction, label_smoothing=0.1
        )

    def pixels(h, y):
        return F.linear_cross_entropy(h, values(CLASSES, 2, CLASSES), y, ignore_index=1, reduction=reduction)

    def soft(h, y):
        return F.linear_cross_entropy(h, matrix, y, reduction=reduction)

    mean = reduction == "mean"
    check(loss, IGNORED, mean=mean)
    check(pixels, labels(ROWS, 2).masked_fill(torch.arange(ROWS)[:, None] < 3, 1), mean=mean)
    check(soft, WEIGHTS.softmax(1), mean=mean)
    if mean:
        check(with_options, IGNORED)


@pytest.mark.parametrize("weight", [None, CLASS_WEIGHTS], ids=["", "class weights"])
def test_soft_labels_of_selected_rows(weight):
    """As in distillation over the tokens that are not padding."""

    def loss(h, y, mask):
        return F.cross_entropy(h[mask], y[mask], weight, label_smoothing=0.1)

    check(loss, WEIGHTS.softmax(1), torch.arange(ROWS) > 4)
    check(lambda h, y: F.cross_entropy(h, y, weight), WEIGHTS.softmax(1))


WEIGHTED = [
    loss for loss in (F.mse_loss, F.l1_loss, F.huber_loss) if "weight" in inspect.signature(loss).parameters
]  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", WEIGHTED, ids=lambda loss: loss.__name__)
def test_losses_with_weights_of_elements(loss, reduction):
    check(
        lambda h, w: loss(h, torch.ones_like(h), reduction=reduction, weight=w).sum(), WEIGHTS, mean=reduction == "mean"
    )


@pytest.mark.parametrize("loss", WEIGHTED, ids=lambda loss: loss.__name__)
def test_weights_of_elements_that_are_learnt_have_the_whole_batchs_gradient(loss):
    check(lambda h: loss(h, torch.ones_like(h), weight=h.exp()))


def test_losses_whose_mean_is_over_rows():
    """However uneven the weights of the rows are."""
    lengths = torch.arange(1, ROWS + 1).clamp(max=4)

    def ctc(h, lengths):
        steps = h.unsqueeze(0).repeat(9, 1, 1).log_softmax(2)
        return F.ctc_loss(steps, labels(4).clamp(min=1).expand(len(h), 4), torch.full((len(h),), 9), lengths)

    check(ctc, lengths)
    check(lambda h, y: F.multi_margin_loss(h, y, weight=CLASS_WEIGHTS), labels(ROWS))
    check(lambda h, w: F.gaussian_nll_loss(h, torch.ones_like(h), w + 0.1), WEIGHTS)
    check(lambda h, w: F.poisson_nll_loss(h, w), WEIGHTS)
    check(lambda h, w: F.kl_div(h.log_softmax(1), w.softmax(1), reduction="batchmean"), WEIGHTS)
    check(lambda h, w: F.binary_cross_entropy_with_logits(h, w.sigmoid(), weight=w), WEIGHTS)
    check(lambda h, w: F.multilabel_soft_margin_loss(h, w.sigmoid(), weight=CLASS_WEIGHTS), WEIGHTS)


def test_the_loss_of_an_adaptive_softmax():
    class Adaptive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.AdaptiveLogSoftmaxWithLoss(4, CLASSES, [2, 3])
            self.double()

        def forward(self, x, y):
            return self.head(self.layer(x), y).loss

    def loop(model):
        value = model(values(ROWS, 3), labels(ROWS))
        value.backward()
        return value

    assert_same(Adaptive, loop)


def test_means_of_bags():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.EmbeddingBag(CLASSES, 3, mode="mean", padding_idx=0).double()

        def forward(self, x):
            return self.bags(x).square().mean()

    def loop(model):
        value = model(labels(ROWS, 4).masked_fill(torch.arange(ROWS)[:, None] < torch.arange(4), 0))
        value.backward()
        return value

    assert_same(Bags, loop)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("rows", [2, 3, 6, 7], ids="{} rows".format)
@pytest.mark.parametrize("scalar_outputs", [None, "sum"])
def test_a_mean_of_labels_for_each_row_in_a_loop_is_refused(replicas, rows, scalar_outputs):
    """Each row's would be normalised together with a row of another replica."""

    def loss(h, y):
        return sum(F.cross_entropy(h[i : i + 1], y[i : i + 1]) for i in range(len(h)))

    model = wrap(Net(loss), replicas, scalar_outputs=scalar_outputs)
    with pytest.raises((RuntimeError, ValueError), match=r"in a loop|one per row"):
        model(values(rows, 3), labels(rows))
    model.module.loss = lambda h, y: F.cross_entropy(h, y, reduction="sum")
    assert model(values(rows, 3), labels(rows)).item() > 0


def test_sums_and_rows_without_a_batch_dimension_may_be_computed_one_by_one():
    check(lambda h, y: sum(F.cross_entropy(h[i], y[i]) for i in range(len(h))), labels(ROWS), mean=False)
    check(
        lambda h, y: sum(F.cross_entropy(h[i : i + 1], y[i : i + 1], reduction="sum") for i in range(len(h))),
        IGNORED,
        mean=False,
    )


def test_several_losses_of_all_rows():
    def loss(h, y):
        heads = [h, h * 2, h.square()]
        return sum(F.cross_entropy(head, y) for head in heads) / len(heads)

    check(loss, IGNORED)
