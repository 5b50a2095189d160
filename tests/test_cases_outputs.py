"""Outputs and losses as people use them, in ways that go wrong when a batch is computed in parts."""

from __future__ import annotations

import dataclasses
import io
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import REPLICAS, assert_same, wrap

CLASSES = 5


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(*shape, seed=0):
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Returns what a function makes of its layer's output."""

    def __init__(self, function=lambda h: h):
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)
        self.function = function

    def forward(self, x, *args, **kwargs):
        return self.function(self.layer(x), *args, **kwargs)


def check(function, loop, **options):
    assert_same(lambda: Net(function), loop, **options)


# ---------------------------------------------------------------------- losses in forward


@dataclasses.dataclass
class Output(OrderedDict):
    """As the outputs of transformers: a dataclass and a dict, without the fields that are None."""

    loss: Any = None
    logits: Any = None
    states: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def causal_loss(h, tokens, num_items_in_batch=None):
    """As transformers computes it: of the next token, by a count of the caller's or by that of valid labels."""
    logits, targets = h[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    if num_items_in_batch is None:
        loss = F.cross_entropy(logits, targets, ignore_index=-100)
    else:
        loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch
    return Output(loss=loss, logits=h)


@pytest.mark.parametrize("count", [None, 17, 17.0, torch.tensor(17)], ids=["labels", "int", "float", "tensor"])
def test_a_loss_and_logits_in_a_model_output_over_accumulated_batches(count):
    def loop(model):
        seen = []
        for step in range(3):
            tokens = labels(7, 6, seed=step)
            tokens[torch.arange(7)[:, None] > torch.arange(6) + step] = -100
            output = model(
                values(7, 6, 3, seed=step), tokens, **({} if count is None else {"num_items_in_batch": count})
            )
            output.loss.backward()
            seen += [output["loss"], output[0], output.logits, output.states, list(output)]
        return seen

    check(causal_loss, loop)


def test_values_of_python_beside_a_loss():
    def function(h, words):
        return {
            "loss": h.square().mean(),
            "n": 4,
            "note": "fine",
            "words": [[w, [w.upper()]] for w in words],
            "no": None,
        }

    def loop(model):
        output = model(values(7, 3), [f"w{i}" for i in range(7)])
        output["loss"].backward()
        return output

    check(function, loop)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "loss",
    [lambda h, y: F.cross_entropy(h, y), lambda h, y: h.square().mean(), lambda h, y: h.square().sum()],
    ids=["cross entropy", "mean", "sum"],
)
@pytest.mark.parametrize("rows", [range(7), range(5), [1], [6]], ids=["all", "first", "second row", "last row"])
def test_a_loss_that_is_not_finite_at_the_first_call_and_finite_ones_after_it(loss, bad, rows):
    def loop(model):
        x = values(7, 3)
        x[list(rows), 1] = bad
        losses = [model(x, labels(7))]
        losses[0].backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        losses.append(model(values(7, 3), labels(7)))
        losses[1].backward()
        return losses, gradients

    check(loss, loop)


def test_a_first_batch_without_any_label():
    def loop(model):
        first = model(values(7, 3), torch.full((7,), -100))
        first.backward()
        second = model(values(7, 3), labels(7).masked_fill(torch.arange(7) < 5, -100))
        second.backward()
        return first, second

    check(lambda h, y: F.cross_entropy(h, y), loop)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_masked_mean_after_a_first_batch_that_was_not_finite_is_still_refused(replicas):
    def function(h, y):
        mask = (y != -100).float()
        return (F.cross_entropy(h, y, reduction="none") * mask).sum() / mask.sum()

    model = wrap(Net(function), replicas)
    assert math.isnan(model(values(7, 3) * math.nan, labels(7)))
    with pytest.raises(ValueError, match="whole_batch"):
        model(values(7, 3), labels(7).masked_fill(torch.arange(7) > 4, -100).roll(3))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_constant_that_changes_with_the_rows_is_refused_by_its_path(replicas):
    model = wrap(Net(lambda h: {"h": h, "size": torch.ones(3)}), replicas)
    model(values(7, 3))
    model.module.function = lambda h: {"h": h, "size": torch.full((3,), float(len(h) ** 2))}
    with pytest.raises(ValueError, match=r'output\["size"\]'):
        model(values(7, 3))


def test_a_tagger_with_outputs_of_every_sort():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)

        def forward(self, batch):
            states, (hidden, _) = self.rnn(batch["x"])
            return {
                "states": states, "flat": states.flatten(0, 1), "hidden": hidden, "loss": states.square().mean(),
                "names": [name.upper() for name in batch["names"]], "weight": self.rnn.weight_hh_l0, "extra": None,
            }  # fmt: skip

    def loop(model):
        output = model({"x": values(7, 5, 3), "names": list("abcdefg")})
        (output["loss"] + output["hidden"].sum() + output["flat"].mean()).backward()
        return output

    assert_same(Tagger, loop)


# ---------------------------------------------------------------------- outputs that nobody needs


def test_outputs_dropped_at_any_moment_before_backward():
    def loop(model):
        first, second, third = model(values(7, 3))
        loss = second.mean()
        del first, second
        loss.backward(retain_graph=True)
        del third
        loss.backward()
        model(values(7, 3, seed=1))
        left, _, _ = model(values(7, 3, seed=2))
        left.sum().backward()
        return loss

    check(lambda h: (h, h.exp(), h[:, :2]), loop)


# ---------------------------------------------------------------------- losses outside of forward


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [2, 3, 7])
def test_cross_entropy_of_pixels_where_only_the_last_shard_has_labels(reduction, rows):
    def loop(model):
        logits = model(values(rows, 4, 3)).movedim(-1, 1)
        targets = labels(rows, 4)
        targets[:-1] = 255
        weight = torch.linspace(0.1, 2, CLASSES)
        loss = F.cross_entropy(logits, targets, weight, ignore_index=255, reduction=reduction, label_smoothing=0.1)
        (loss.sum() * 2).backward()
        return loss

    check(lambda h: h, loop, tolerance=1e-6)


def supervised_contrastive(features, y):
    features = F.normalize(features, dim=1)
    logits = features @ features.T / 0.1
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    others = ~torch.eye(len(y), dtype=torch.bool)
    positive = (y[:, None] == y) & others
    log_prob = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    return -((log_prob * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


def clip(features, _):
    half = F.normalize(features[:, :2], dim=1) @ F.normalize(features[:, 2:4], dim=1).t() * 7
    target = torch.arange(len(features))
    return (F.cross_entropy(half, target) + F.cross_entropy(half.t(), target)) / 2


def hardest_triplets(features, y):
    distances = torch.cdist(features, features)
    same = y[:, None] == y[None]
    furthest = distances.masked_fill(~same, 0).amax(1)
    nearest = distances.masked_fill(same, 99).amin(1)
    return F.relu(furthest - nearest + 1).mean()


def barlow_twins(features, _):
    normal = (features - features.mean(0)) / features.std(0)
    correlation = normal.T @ normal / len(features)
    on = (torch.diagonal(correlation) - 1).square().sum()
    return on + 0.1 * (correlation - torch.diag(torch.diagonal(correlation))).square().sum()


def vicreg(features, _):
    spread = F.relu(1 - torch.sqrt(features.var(dim=0) + 1e-4)).mean()
    return spread + torch.cov(features.T).square().sum() + F.mse_loss(features[1:], features[:-1])


def centres(features, y):
    means = features.new_zeros(CLASSES, CLASSES).index_add(0, y, features)
    means = means / torch.bincount(y, minlength=CLASSES).clamp(min=1)[:, None]
    return (features - means[y]).square().sum(1).mean()


def cosine_pairs(features, y):
    return F.cosine_embedding_loss(features[::2][:3], features[1::2], torch.tensor([1, -1, 1])) + y.sum() * 0


COUPLED = [supervised_contrastive, clip, hardest_triplets, barlow_twins, vicreg, centres, cosine_pairs]


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_losses_between_rows_of_the_whole_batch(loss):
    def loop(model):
        y = torch.tensor([0, 1, 0, 2, 1, 0, 2])
        value = loss(model(values(7, 3).double()), y)
        value.backward()
        return value

    assert_same(lambda: nn.Linear(3, CLASSES, bias=loss is clip).double(), loop, tolerance=1e-9)


def test_a_loss_module_of_ones_own_with_state():
    """It keeps a moving centre of the outputs, as in DINO, and a queue of features, as in MoCo."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(CLASSES))
            self.register_buffer("queue", torch.zeros(4, CLASSES))

        def forward(self, h):
            loss = -(h.log_softmax(1) * (h.detach() - self.centre).softmax(1)).sum(1).mean() + (h @ self.queue.T).mean()
            self.centre.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            self.queue = torch.cat([h.detach(), self.queue])[:4]
            return loss

    def loop(model):
        criterion = Centred()
        losses = []
        for step in range(3):
            losses.append(criterion(model(values(7, 3, seed=step))))
            losses[-1].backward()
        return losses, criterion.centre, torch.as_tensor(criterion.queue)

    check(lambda h: h, loop)


# ---------------------------------------------------------------------- what else is done with outputs


LOOKS = {
    "rows": lambda h: (h[0], h[-1], h[:3], h[2:6:2], h[[5, 0, 0]], h[torch.tensor([1, 6])], h[..., 1], h[None]),
    "unpacked": lambda h: (*h,),
    "matrices": lambda h: (h.T @ h, h @ h.T, torch.einsum("ni,nj->ij", h, h), h.t().matmul(h.exp())),
    "sorted": lambda h: (*h.sort(0), *h.sort(0, descending=True), *h.topk(3, 0), h.argsort(0), h.median(0).values),
    "joined": lambda h: (torch.cat([h, torch.ones(2, CLASSES)]), torch.stack([h, h]), torch.cat([h, h], 1)),
    "masks": lambda h: (h[h > 0], h[h[:, 0] > 0], h.masked_select(h < 0), torch.where(h > 0, h, h * 2), h.nonzero()),
    "windows": lambda h: (h.unfold(0, 3, 2), h.chunk(3), h.split([2, 5]), h.roll(2, 0), h.flip(0), h.diff(dim=0)),
    "over rows": lambda h: (h.cumsum(0), h.std(0), h.var(), h.norm(), h.prod(0), h.logsumexp(0), h.quantile(0.5)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_outputs_in_any_way_and_differentiating(name):
    def loop(model):
        found = [x for x in LOOKS[name](model(values(7, 3))) for x in (x if isinstance(x, tuple) else (x,))]
        sum((place + 1) * x.square().sum() for place, x in enumerate(found) if x.requires_grad).backward()
        return found

    check(lambda h: h, loop)


def test_assignment_through_masks_rows_and_views():
    def loop(model):
        h = model(values(7, 3)).clone()
        y = model(values(7, 3, seed=1))
        h[h > 0.5] = 0.5
        h[2] = 7.0
        h[3:5] += y[3:5] * 2
        h[:, 1] = y[:, 0].exp()
        h[labels(7) == 1] *= 3
        h[torch.arange(7) > 4, 2:4] = y[torch.arange(7) > 4, 2:4]
        h.masked_fill_(y < -1, 0.25)
        h[-1, -1] = h[0, 0]
        view = h[1:3]
        view.mul_(2)
        h.square().sum().backward()
        return h, view

    check(lambda h: h, loop)


def test_printing_formatting_saving_and_numpy():
    def loop(model):
        h = model(values(7, 3))
        loss = h.square().mean()
        file = io.BytesIO()
        torch.save({"h": h.detach(), "loss": loss}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        plain = h.detach()
        return (
            str(plain.mul(8).round().int()), f"{loss:.3f} {loss.item():8.2e} {h.shape} {len(h)}", f"{plain[0, 0]:.2f}",
            str(plain.numpy().round(3)), np.asarray(plain).round(3).tolist(), np.round(plain.cpu().numpy().mean(), 4),
            float(loss), int(h.argmax()), bool(loss > 0), loaded, plain.tolist(), round(loss.item(), 4),
            [round(row.sum().item(), 4) for row in plain], {round(float(x), 3) for x in plain[:, 0]},
        )  # fmt: skip

    check(lambda h: h, loop)


def test_metrics_of_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics")

    def loop(model):
        metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
                "top": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, top_k=2, average="macro"),
                "auroc": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
                "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro"),
                "confusion": torchmetrics.ConfusionMatrix(task="multiclass", num_classes=CLASSES),
            }
        )
        error, mean = torchmetrics.MeanSquaredError(), torchmetrics.MeanMetric()
        correlation = torchmetrics.PearsonCorrCoef(num_outputs=CLASSES)
        found = []
        for step, rows in enumerate((7, 9, 4)):
            out = model(values(rows, 3, seed=step))
            y = labels(rows, seed=step)
            loss = F.cross_entropy(out, y)
            loss.backward()
            found.append(metrics(out.softmax(1), y))
            error.update(out, values(rows, CLASSES, seed=9))
            correlation.update(out.detach(), values(rows, CLASSES, seed=9))
            mean.update(loss.detach(), weight=rows)
        final = {**metrics.compute(), "e": error.compute(), "c": correlation.compute(), "m": mean.compute()}
        return [torch.as_tensor(x) for x in [*final.values(), *(x for each in found for x in each.values())]]

    check(lambda h: h, loop)


def test_metrics_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")

    def loop(model):
        with torch.no_grad():
            out = model(values(40, 3))
        y = labels(40)
        return (
            float(metrics.accuracy_score(y, out.argmax(1))),
            float(metrics.f1_score(y, out.argmax(1), average="macro")),
            metrics.confusion_matrix(y.numpy(), out.argmax(1).numpy()).tolist(),
            float(metrics.roc_auc_score(y, out.double().softmax(1), multi_class="ovr")),
            float(metrics.log_loss(y, out.double().softmax(1).tolist())),
            float(metrics.mean_squared_error(values(40, CLASSES), out)),
            float(metrics.average_precision_score(y == 1, out[:, 1])),
        )

    check(lambda h: h, loop)


# ---------------------------------------------------------------------- precision


def test_a_model_in_float16_with_a_scaler_that_skips_overflows():
    """Overflows in one shard only must skip the step for all."""

    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            x = values(7, 3, seed=step)
            x[6] *= 1e5 if step == 2 else 1
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
                assert out.dtype == torch.float16
                loss = F.cross_entropy(out.float(), labels(7, seed=step))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[2] < scales[1]
        return scales

    check(lambda h: h, loop, tolerance=5e-3)


def test_a_loss_of_float16_computed_in_forward():
    def loop(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(values(7, 3, seed=step), labels(7).masked_fill(torch.arange(7) < 4, -100))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss)
        return losses

    check(lambda h, y: F.cross_entropy(h, y), loop, tolerance=5e-3)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_the_callers_in_every_replica(enabled):
    def function(h):
        kinds = [str(h.dtype), str((h @ h.T).dtype), torch.is_autocast_enabled("cpu"), str(h.softmax(1).dtype)]
        return h, [kinds for _ in h]

    def loop(model):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, kinds = model(values(7, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            inner, inner_kinds = model(values(7, 3))
        out.float().sum().backward()
        return out, kinds, inner, inner_kinds

    check(function, loop, tolerance=2e-2)


# ---------------------------------------------------------------------- gradients


def test_a_gradient_penalty_between_real_and_fake_in_every_step():
    def loop(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        penalties = []
        for step in range(3):
            optimizer.zero_grad()
            real, fake, share = values(7, 3, seed=step), values(7, 3, seed=step + 9), torch.linspace(0, 1, 7)[:, None]
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            score = model(mixed)
            (slope,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
            penalty = (slope.norm(2, dim=1) - 1).square().mean()
            (model(fake).mean() - model(real).mean() + 10 * penalty).backward()
            optimizer.step()
            penalties.append(penalty)
        return penalties

    def make():
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    assert_same(make, loop, tolerance=1e-4)


def test_projected_gradient_steps_on_the_input():
    def loop(model):
        x, y = values(7, 3), labels(7)
        adversarial = x.clone()
        for _ in range(3):
            adversarial.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(adversarial), y), adversarial)
            adversarial = (adversarial.detach() + 0.05 * gradient.sign()).clamp(x - 0.1, x + 0.1)
        F.cross_entropy(model(adversarial), y).backward()
        return torch.as_tensor(adversarial)

    check(lambda h: h, loop)


def test_hooks_that_change_gradients_of_outputs_losses_and_parameters():
    def loop(model):
        seen = []
        handles = [parameter.register_hook(lambda g: g.clamp(-0.01, 0.01)) for parameter in model.parameters()]
        out = model(values(7, 3))
        out.register_hook(lambda g: g * torch.arange(7.0)[:, None])
        hidden = out.tanh()
        hidden.retain_grad()
        hidden.register_hook(lambda g: seen.append(g.norm().item()))
        loss = hidden.square().mean()
        loss.register_hook(lambda g: g * 100)
        loss.backward(retain_graph=True)
        loss.backward()
        for handle in handles:
            handle.remove()
        hidden_gradient = torch.as_tensor(hidden.grad)
        model(values(7, 3)).sum().backward()
        return seen, hidden_gradient

    check(lambda h: h, loop)


def test_two_outputs_of_one_forward_with_an_optimizer_each():
    def loop(model):
        weight, bias = model.parameters()
        steps = torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([bias], lr=0.1)
        for step in range(3):
            left, right = model(values(7, 3, seed=step))
            first, second = left.square().mean(), right.exp().sum()
            for loss, optimizer in zip((first, second), steps, strict=True):
                optimizer.zero_grad()
                loss.backward(retain_graph=loss is first)
            for optimizer in steps:
                optimizer.step()
        return first, second

    check(lambda h: (h, h[:, :2]), loop)
