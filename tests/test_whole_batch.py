"""Losses and statistics inside of `forward` are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import evenly
from parity import REPLICAS, assert_same, training, wrap

WORDS = 11


class LanguageModel(nn.Module):
    """Its loss is computed in `forward`, as most language models do."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, WORDS)
        self.register_buffer("weight", torch.linspace(0.1, 2, WORDS, dtype=torch.float64))
        self.loss = loss
        self.double()

    def forward(self, tokens, labels, *more):
        logits = self.head(self.embedding(tokens))
        return self.loss(self, logits, labels, *more), logits


def padded(rows: int = 7) -> tuple[Tensor, Tensor]:
    """Tokens and labels of very different lengths: the first rows have no label at all, the last have all."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (rows, 5), generator=generator)
    labels = torch.randint(0, WORDS, (rows, 5), generator=generator)
    for row in range(rows):
        labels[row, row * 6 // rows :] = -100
    return tokens, labels


def cross_entropy(_, logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_module(_, logits, labels):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.transpose(1, 2), labels)


def with_class_weights(model, logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=model.weight, label_smoothing=0.2)


def nll(model, logits, labels):
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten(), weight=model.weight)


def beside_an_ordinary_mean(_, logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * logits.square().mean()


def masked_mean(_, logits, labels):
    losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
    mask = (labels != -100).double()
    return (losses * mask).sum() / evenly.whole_batch(mask.sum())


def weighted_by_what_is_learnt(_, logits, labels):
    weights = logits.square().mean(-1)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
    return (losses * weights).sum() / evenly.whole_batch(weights.sum())


LOSSES = [
    cross_entropy, of_module, with_class_weights, nll, beside_an_ordinary_mean, masked_mean, weighted_by_what_is_learnt,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_in_forward_with_very_uneven_shards(loss) -> None:
    def loop(model):
        for _ in range(2):
            value, logits = model(*padded())
            value.backward()
        return value, logits

    assert_same(lambda: LanguageModel(loss), loop)


@pytest.mark.parametrize("loss", LOSSES)
def test_twenty_steps_on_a_loss_in_forward(loss) -> None:
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(20):
            optimizer.zero_grad()
            value, _ = model(*padded(4 + step % 4))
            value.backward()
            optimizer.step()
        return value

    assert_same(lambda: LanguageModel(loss), loop, replicas=[2])


def test_a_loss_divided_by_a_count_that_is_given() -> None:
    def loss(_, logits, labels, count):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count

    def loop(model):
        tokens, labels = padded()
        value, _ = model(tokens, labels, (labels != -100).sum())
        value.backward()
        return value

    assert_same(lambda: LanguageModel(loss), loop)


def test_a_batch_without_any_label_is_nan_as_it_is_bare() -> None:
    def loop(model):
        tokens, labels = padded()
        return model(tokens, torch.full_like(labels, -100))[0]

    assert_same(lambda: LanguageModel(cross_entropy), loop)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_loss_that_is_neither_mean_nor_sum_says_what_to_do(replicas: int) -> None:
    def loss(_, logits, labels):
        losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
        mask = (labels != -100).double().flatten() + 0.1
        return (losses * mask).sum() / mask.sum()

    model = wrap(LanguageModel(loss), replicas)
    with pytest.raises(ValueError, match="whole_batch"):
        model(*padded())
    model.module.loss = masked_mean
    assert model(*padded())[0].item() > 0


@pytest.mark.parametrize("replicas", REPLICAS)
def test_replicas_that_disagree_on_what_they_sum_up_say_so(replicas: int) -> None:
    def loss(_, logits, labels):
        total = logits.sum()
        return total / evenly.whole_batch(total) if int(labels[0, 0]) == -100 else total

    model = wrap(LanguageModel(loss), replicas)
    with pytest.raises(RuntimeError, match="whole batch"):
        model(*padded())
    model.module.loss = cross_entropy
    assert model(*padded())[0].item() > 0


def test_the_error_of_one_replica_is_not_hidden_by_the_others_waiting_for_it() -> None:
    def loss(model, logits, labels):
        if int(labels[0, 0]) != -100:
            raise KeyError("broken shard")
        return cross_entropy(model, logits, labels)

    model = wrap(LanguageModel(loss), 2)
    with pytest.raises(KeyError, match="broken shard"):
        model(*padded())


def test_outside_of_a_forward_it_is_the_tensor_itself() -> None:
    x = torch.ones(3)
    assert evenly.whole_batch(x) is x


def norm_net(norm: nn.Module) -> nn.Module:
    # Without a bias, whose gradient before a normalisation is nothing but rounding errors.
    first = nn.Conv1d(2, 4, 3, bias=False)
    return nn.Sequential(first, norm, nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)).double()


def norm_batches(rows: list[int]) -> list[tuple[tuple[Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            (torch.randn(n, 2, 8, generator=generator, dtype=torch.float64) * n,),
            torch.randn(n, 3, generator=generator).double(),
        )
        for n in rows
    ]


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, affine=False),
        lambda: nn.BatchNorm1d(4, momentum=None),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.Sequential(nn.Unflatten(2, (2, 3)), nn.BatchNorm2d(4), nn.Flatten(2)),
        lambda: nn.Sequential(nn.Unflatten(2, (1, 2, 3)), nn.BatchNorm3d(4, momentum=0.3), nn.Flatten(2)),
    ],
    ids=["1d", "not affine", "cumulative", "no running statistics", "2d", "3d"],
)
def test_synchronised_batch_normalisation_is_that_of_the_whole_batch(norm) -> None:
    loop = training(norm_batches([7, 2, 5, 3]), F.mse_loss, lambda parameters: torch.optim.SGD(parameters, 0.05))
    assert_same(lambda: norm_net(norm()), loop, sync_batchnorm=True)


def test_without_synchronisation_the_running_statistics_follow_replica_0() -> None:
    module = norm_net(nn.BatchNorm1d(4))
    alone = norm_net(nn.BatchNorm1d(4))
    alone.load_state_dict(module.state_dict())
    ((x,), _), *_ = norm_batches([8])
    wrap(module, 2)(x)
    alone(x[:4])
    torch.testing.assert_close(module[1].running_mean, alone[1].running_mean)
    torch.testing.assert_close(module[1].running_var, alone[1].running_var)
