"""Normalisation and reparametrised layers, as the bare module on the whole batch has them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from parity import REPLICAS, assert_same, compare, training, wrap


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bare(model):
    return getattr(model, "module", model)


SPATIAL = {1: (6,), 2: (3, 2), 3: (2, 2, 2)}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

OPTIONS = {
    "plain": {},
    "momentum=None": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
    "not affine": {"affine": False},
    "large eps": {"eps": 0.1},
}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_synchronised_batch_norm_of_every_kind_over_uneven_shards_in_training_and_evaluation(dims, option):
    def make():
        return nn.Sequential(
            CONVS[dims](2, 3, 1, bias=False), NORMS[dims](3, **OPTIONS[option]), nn.Flatten(1)
        ).double()

    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for seed, count in enumerate((7, 5, 8)):
            optimizer.zero_grad()
            output = model.train()(rows(count, 2, *SPATIAL[dims], seed=seed))
            output.square().mul(torch.arange(float(output.shape[1]))).mean().backward()
            optimizer.step()
            seen.append(output)
            seen.append(model.eval()(rows(count, 2, *SPATIAL[dims], seed=seed + 10)))
        return seen

    assert_same(make, loop, sync_batchnorm=True, tolerance=1e-9)


@pytest.mark.parametrize("sync", [False, True])
def test_frozen_batch_norm(sync):
    """In evaluation, with or without gradients for its weights, inside of a model that trains."""

    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
        model[1].running_mean.copy_(rows(4))
        model[1].running_var.copy_(rows(4, seed=1).abs() + 0.5)
        return model

    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for seed, count in enumerate((5, 1, 7, 2)):
            model.train()
            bare(model)[1].eval()
            bare(model)[1].requires_grad_(seed % 2 == 0)
            optimizer.zero_grad()
            output = model(rows(count, 3, seed=seed))
            output.square().mean().backward()
            optimizer.step()
            seen.append(output)
        return seen

    assert_same(make, loop, sync_batchnorm=sync)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_follow_replica_0_and_survive_save_and_load(replicas, momentum):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum)).double()

    module, twin = make(), make()
    model = wrap(module, replicas)
    for seed, count in enumerate((7, 9)):
        x = rows(count, 3, seed=seed)
        model(x).sum().backward()
        twin(x[: -(-count // replicas)])
    compare(dict(module.named_buffers()), dict(twin.named_buffers()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = make()
    loaded.load_state_dict(torch.load(file))
    other = wrap(make(), replicas)
    other.load_state_dict(loaded.state_dict())
    for one in (loaded, other, model):
        compare(one.eval()(rows(5, 3)), twin.eval()(rows(5, 3)))
    # and training goes on from what was loaded
    other.train()(rows(8, 3))
    twin.train()(rows(8, 3)[: -(-8 // replicas)])
    compare(dict(other.named_buffers()), dict(twin.named_buffers()))


def test_statistics_set_by_hand_between_steps():
    def loop(model):
        norm = bare(model)[1]
        seen = [model.eval()(rows(5, 3))]
        norm.reset_running_stats()
        norm.running_mean += 1
        seen.append(model(rows(5, 3)))
        norm.running_var = torch.full((4,), 4.0, dtype=torch.float64)
        seen.append(model(rows(5, 3)))
        norm.momentum = 0.9
        norm.eps = 0.5
        seen.append(model(rows(5, 3)))
        return seen

    assert_same(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), loop)


def test_gan_with_synchronised_batch_norm_and_spectral_norm():
    """Two forwards of the discriminator, one backward; the power iteration moves on at each forward."""

    def make():
        return nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(3, 4, bias=False)), nn.BatchNorm1d(4), nn.LeakyReLU(0.2), nn.Linear(4, 1)
        ).double()

    def loop(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen = []
        for seed in range(3):
            optimizer.zero_grad()
            real, fake = model(rows(7, 3, seed=seed)), model(rows(5, 3, seed=seed + 10))
            loss = F.softplus(-real).mean() + F.softplus(fake).mean()
            loss.backward()
            optimizer.step()
            seen.append(loss)
        return seen

    assert_same(make, loop, sync_batchnorm=True, tolerance=1e-8)


@pytest.mark.parametrize(
    "norm",
    [nn.utils.weight_norm, parametrizations.weight_norm, nn.utils.spectral_norm, parametrizations.spectral_norm],
    ids=["weight norm, old", "weight norm", "spectral norm, old", "spectral norm"],
)
@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(2, 3, 2)], ids=["linear", "conv"])
def test_reparametrised_layers_over_many_steps_of_training_and_evaluation(norm, layer):
    make_layer = layer

    def make():
        inner = norm(make_layer())
        shape = (2, 2) if isinstance(inner, nn.Conv1d) else (4,)
        return nn.Sequential(nn.Unflatten(1, shape), inner, nn.Flatten(1)).double()

    def loop(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen = []
        for seed, count in enumerate((5, 8, 3, 7)):
            optimizer.zero_grad()
            output = model.train()(rows(count, 4, seed=seed))
            output.square().mean().backward()
            optimizer.step()
            seen.append(output)
            with torch.no_grad():
                seen.append(model.eval()(rows(count, 4, seed=seed)))
        return seen

    assert_same(make, loop, tolerance=1e-9)


def test_a_weight_norm_that_is_removed_between_steps():
    def loop(model):
        seen = [model(rows(5, 3))]
        seen[0].sum().backward()
        nn.utils.remove_weight_norm(bare(model)[0])
        seen.append(model(rows(5, 3)))
        seen[1].sum().backward()
        return seen

    assert_same(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))).double(), loop)


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {"bidirectional": both}) for kind in (nn.LSTM, nn.GRU, nn.RNN) for both in (False, True)),
     (nn.LSTM, {"proj_size": 2})],
)  # fmt: skip
def test_recurrent_layers_in_a_training_loop(kind, options):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4, num_layers=2, batch_first=True, **options)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)

    def loss(output, target):
        hidden = output[1][0] if isinstance(output[1], tuple) else output[1]
        return output[0].square().mean() + hidden.sin().mean() * target

    batches = [((rows(count, 4, 3, seed=count),), 2.0) for count in (5, 7, 3)]
    assert_same(
        lambda: Recurrent().double(),
        training(batches, loss, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        tolerance=1e-9,
    )


def test_weights_tied_in_every_way():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.again = self.first  # the module itself
            self.plain = [self.first.weight]  # not registered a second time
            self.embed = nn.Embedding(3, 3)

        def forward(self, x):
            return self.again(self.second(self.first(x)).tanh()) @ self.plain[0].t() @ self.embed.weight

    def loop(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for seed in range(3):
            optimizer.zero_grad()
            output = model(rows(5, 3, seed=seed))
            output.square().mean().backward()
            optimizer.step()
            seen.append(output)
        module = bare(model)
        module.embed.weight = module.first.weight  # tied only now
        seen.append(model(rows(5, 3)))
        module.second.weight = nn.Parameter(module.first.weight.detach().clone())  # and this one untied
        seen.append(model(rows(5, 3)))
        seen[-1].sum().backward()
        return seen, len(list(model.parameters()))

    assert_same(lambda: Tied().double(), loop)


LAZY = {
    "linear": (lambda: nn.LazyLinear(2), (5, 3)),
    "conv": (lambda: nn.Sequential(nn.LazyConv2d(3, 2), nn.LazyBatchNorm2d(), nn.Flatten(1)), (5, 2, 4, 4)),
    "without weights": (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 2)), (5, 3)),
    "nested": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ModuleDict({"a": nn.LazyLinear(2)})["a"]), (5, 3)),
}


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", LAZY)
def test_lazy_modules_once_the_bare_module_has_seen_a_batch(name, replicas):
    make, shape = LAZY[name]
    model = wrap(make().double(), replicas)
    with pytest.raises(ValueError, match="has no shape yet: run one batch through the bare module"):
        model(rows(*shape))
    model.eval()
    model.module(rows(*shape))
    twin = copy.deepcopy(model.module)
    for seed in range(2):
        output, expected = model(rows(*shape, seed=seed)), twin(rows(*shape, seed=seed))
        compare(output, expected)
        output.square().mean().backward()
        expected.square().mean().backward()
    compare([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_network_with_its_optimizer(dtype):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 4, dtype=dtype)
            self.second = nn.Linear(4, 2, dtype=dtype)
            self.phase = nn.Parameter(torch.ones(4, dtype=dtype.to_real()))

        def forward(self, x):
            hidden = self.first(x.to(dtype)) * torch.polar(torch.ones_like(self.phase), self.phase)
            return self.second(hidden * hidden.abs().sigmoid())

    def loop(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen = []
        for seed in range(3):
            optimizer.zero_grad()
            output = model(rows(5, 3, seed=seed))
            loss = output.abs().square().mean() + output.angle().sin().mean()
            loss.backward()
            optimizer.step()
            seen += [output, loss]
        return seen

    assert_same(Complex, loop, tolerance=1e-4 if dtype is torch.complex64 else 1e-9)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_embeddings_with_empty_rows_and_repeated_tokens(optimizer):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 4, sparse=True, padding_idx=0)
            self.bag = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")

        def forward(self, tokens):
            return self.embed(tokens).sum(1) * self.bag(tokens)

    def loop(model):
        stepper = optimizer(model.parameters(), lr=0.1)
        seen = []
        for seed in range(3):
            stepper.zero_grad()
            tokens = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(seed))
            tokens[0] = 0
            tokens[3] = 2
            output = model(tokens)
            output.square().mean().backward()
            seen.append([p.grad.coalesce() for p in model.parameters()])
            stepper.step()
        return seen

    assert_same(lambda: Bag().double(), loop)
