"""What a module is and holds counts in every replica, and what forward does to it stays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from modules import Forward, bare, rows
from parity import assert_same, compare, training, wrap


def step(model, *args, seed=0):
    output = model(*(args or (rows(5, seed=seed),)))
    output.exp().mean().backward()
    return output


def test_parameters_are_there_in_forward():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.plist = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
            self.pdict = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})

        def forward(self, x):
            first = next(self.parameters())
            assert first.is_leaf
            assert isinstance(first, nn.Parameter)
            assert len(list(self.parameters())) == 3
            return x * first + x.exp() * self.plist[1] + self.pdict["a"]

    assert_same(Lists, step)


def test_an_attribute_set_in_forward_is_there_in_the_next_and_on_the_module():
    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.last = x.sum(1)
        return self.layer(x) * self.calls

    def loop(model):
        outputs = [step(model, seed=seed) for seed in range(3)]
        return outputs, bare(model).calls, bare(model).seen

    assert_same(lambda: Forward(forward, calls=0, seen=[]), loop)


def test_an_attribute_changed_between_calls_counts_at_the_next():
    def loop(model):
        outputs = []
        for scale in (1.0, 2.0, [3.0]):
            bare(model).scale = scale
            outputs.append(step(model))
        bare(model).scale.append(4.0)
        outputs.append(step(model))
        del bare(model).scale
        outputs.append(step(model))
        return outputs

    def forward(self, x):
        scale = getattr(self, "scale", 7.0)
        return self.layer(x) * (sum(scale) if isinstance(scale, list) else scale)

    assert_same(lambda: Forward(forward), loop)


def test_tensors_that_are_no_buffers():
    def forward(self, x):
        return self.layer(x) * self.plain + torch.sparse.mm(self.sparse, self.dense).sum()

    def loop(model):
        first = step(model)
        bare(model).plain = torch.tensor([3.0, 4.0])
        second = step(model)
        bare(model).plain += 1
        return first, second, step(model)

    def make():
        return Forward(forward, plain=torch.tensor([1.0, 2.0]), sparse=torch.eye(3).to_sparse(), dense=torch.ones(3, 1))

    assert_same(make, loop)


def test_hooks_before_and_after_wrapping_and_removed():
    def loop(model):
        module = bare(model)
        outputs = [step(model)]
        handle = module.layer.register_forward_hook(lambda layer, args, output: output * 2)
        outputs.append(step(model))
        handle.remove()
        outputs.append(step(model))
        pre = module.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
        outputs.append(step(model))
        pre.remove()
        return outputs

    def make():
        module = Forward(lambda self, x: self.layer(x))
        module.layer.register_forward_hook(lambda layer, args, output: output.tanh())
        return module

    assert_same(make, loop)


def test_hooks_on_the_wrapper_see_the_whole_batch():
    def loop(model):
        shapes = []
        model.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
        model.register_forward_hook(lambda module, args, output: shapes.append(output.shape) or output * 2)
        return step(model), shapes

    assert_same(lambda: Forward(lambda self, x: self.layer(x)), loop)


def test_full_backward_hooks():
    def loop(model):
        seen = []
        handle = model.register_full_backward_hook(lambda module, ins, outs: seen.append(outs[0].shape))
        step(model)
        handle.remove()
        return seen

    assert_same(lambda: Forward(lambda self, x: self.layer(x)), loop)


def test_buffers_that_forward_writes_are_those_of_replica_0():
    def forward(self, x):
        self.count += 1
        return self.layer(x) * self.count

    def make():
        module = Forward(forward)
        module.register_buffer("count", torch.zeros(()))
        module.register_buffer("other", torch.ones(2), persistent=False)
        return module

    def loop(model):
        outputs = [step(model, seed=seed) for seed in range(3)]
        bare(model).count.fill_(10)
        outputs.append(step(model))
        bare(model).count = torch.tensor(20.0)
        outputs.append(step(model))
        return outputs

    assert_same(make, loop)


def test_a_buffer_that_requires_grad():
    def make():
        module = Forward(lambda self, x: self.layer(x) * self.scale)
        module.register_buffer("scale", torch.ones(2, requires_grad=True))
        return module

    def loop(model):
        step(model)
        return bare(model).scale.grad

    assert_same(make, loop)


def test_batch_norm_takes_replica_0s_statistics_and_evaluates_exactly():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(module)
    model = wrap(module)
    model(rows(8)).sum().backward()
    twin(rows(8)[:4]).sum().backward()
    compare(dict(module.named_buffers()), dict(twin.named_buffers()))
    compare(model.eval()(rows(7)), twin.eval()(rows(7)))
    state = model.state_dict()
    assert set(state) == set(twin.state_dict())
    twin.load_state_dict(state)
    compare(model(rows(5)), twin(rows(5)))


def test_batch_norm_never_gets_a_single_row():
    model = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3)
    for count in (2, 3, 4, 5, 7):
        assert model(rows(count)).shape == (count, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(rows(1))
    assert model(rows(4)).shape == (4, 4)


def test_two_forwards_and_one_backward_with_batch_norm_and_spectral_norm():
    def make():
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4), nn.Linear(4, 1))

    model = wrap(make())
    (model(rows(6)).mean() - model(rows(6, seed=1)).mean()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


NORMS = {
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
    "weight norm, parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    "spectral norm, parametrized": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 2)),
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)),
    "group norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, affine=True)),
    "bilinear": lambda: Forward(lambda self, x: self.mix(x, x), mix=nn.Bilinear(3, 3, 2)),
    "embedding bag": lambda: Forward(
        lambda self, x: self.bag((x > 0).long() + self.layer(x).argmax(1, keepdim=True)), bag=nn.EmbeddingBag(5, 4)
    ),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Linear(1, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    ),
    "prelu": lambda: nn.Sequential(nn.Linear(3, 2), nn.PReLU()),
}


@pytest.mark.parametrize("name", NORMS)
def test_kinds_of_modules(name):
    def loop(model):
        model.eval()  # power iterations are part of training
        outputs = [step(model, seed=seed) for seed in range(2)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        return outputs, step(model)

    assert_same(NORMS[name], loop)


def test_spectral_norm_in_training():
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            step(model, seed=seed)
            optimizer.step()

    assert_same(lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), loop)
    assert_same(lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), loop)


def test_parametrizing_between_steps():
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    def loop(model):
        layer = bare(model).layer
        outputs = [step(model)]
        parametrize.register_parametrization(layer, "weight", Double())
        outputs.append(step(model))
        parametrize.remove_parametrizations(layer, "weight")
        outputs.append(step(model))
        return outputs

    assert_same(lambda: Forward(lambda self, x: self.layer(x)), loop)


def test_a_module_without_a_shape_yet_is_refused_with_the_remedy():
    model = wrap(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"weight has no shape yet: run one batch through the bare module"):
        model(rows(5))
    model.module(rows(1))
    assert model(rows(5)).shape == (5, 2)


def test_complex_parameters():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    assert_same(Complex, step)


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(sparse):
    def loop(model):
        optimizer = torch.optim.SparseAdam(model.parameters()) if sparse else torch.optim.Adam(model.parameters())
        for seed in range(3):
            optimizer.zero_grad()
            tokens = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(seed))
            model(tokens).square().mean().backward()
            optimizer.step()

    assert_same(lambda: nn.Embedding(9, 4, sparse=sparse, padding_idx=0), loop)


def test_mixed_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2).double()

        def forward(self, x):
            return self.second(self.first(x).double())

    assert_same(Mixed, step)


def test_freezing_unfreezing_and_surgery_between_steps():
    def loop(model):
        module = bare(model)
        outputs = [step(model)]
        module[0].requires_grad_(requires_grad=False)
        outputs.append(step(model))
        module[0].requires_grad_()
        outputs.append(step(model))
        torch.manual_seed(5)
        module[1] = nn.Linear(4, 6)
        outputs.append(step(model))
        module[0].weight = nn.Parameter(torch.ones(4, 3))
        outputs.append(step(model))
        module.append(nn.Tanh())
        outputs.append(step(model))
        module[0].register_parameter("bias", None)
        outputs.append(step(model))
        module.load_state_dict({name: value + 0.5 for name, value in module.state_dict().items()})
        outputs.append(step(model))
        del module[2]
        outputs.append(step(model))
        return outputs

    assert_same(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), loop)


def test_changing_the_dtype_between_steps():
    def loop(model):
        outputs = [step(model)]
        model.double()
        model.zero_grad()
        outputs.append(step(model, rows(5).double()))
        bare(model).bfloat16()
        model.zero_grad()
        outputs.append(step(model, rows(5).bfloat16()))
        model.zero_grad()
        return outputs

    assert_same(lambda: nn.Linear(3, 2), loop)


def test_train_and_eval_of_a_part():
    def loop(model):
        module = bare(model)
        module[1].eval()
        outputs = [step(model)]
        module.eval()
        outputs.append(step(model))
        return outputs

    assert_same(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4).eval()), loop)


def test_writes_to_parameters_by_any_way():
    def loop(model):
        weight = next(iter(model.parameters()))
        outputs = [step(model)]
        weight.data.mul_(2)
        outputs.append(step(model))
        weight.data = torch.ones_like(weight)
        outputs.append(step(model))
        with torch.no_grad():
            weight.copy_(torch.full_like(weight, 3.0))
        outputs.append(step(model))
        weight.detach().numpy()[:] = 4
        outputs.append(step(model))
        nn.utils.vector_to_parameters(torch.arange(8.0), model.parameters())
        outputs.append(step(model))
        return outputs

    assert_same(lambda: nn.Linear(3, 2), loop)


def test_a_compiled_or_scripted_module_is_refused_or_right():
    scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises((ValueError, TypeError), match="TorchScript"):
        wrap(scripted)(rows(5))


def test_the_same_seed_gives_the_same_bits_and_shards_have_masks_of_their_own():
    model = wrap(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5)))
    one = torch.ones(1, 3).repeat(6, 1)

    def run():
        torch.manual_seed(7)
        return [model(one).full_tensor().detach() for _ in range(2)]

    first, second = run()
    again, once_more = run()
    assert torch.equal(first, again)
    assert torch.equal(second, once_more)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0] == 0, first[3] == 0)


def test_a_restored_random_state_goes_on_with_the_same_bits():
    model = wrap(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5)))
    torch.manual_seed(7)
    model(rows(6))
    state = torch.get_rng_state()
    expected = model(rows(6)).full_tensor()
    torch.manual_seed(8)
    torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(model(rows(6)).full_tensor(), expected)


def test_other_generators_do_not_disturb_torchs():
    """Who seeds torch alone has a right to the same numbers from torch."""
    import random

    model = wrap(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5)))
    torch.manual_seed(7)
    expected = model(rows(6)).full_tensor()
    random.random()
    torch.manual_seed(7)
    assert torch.equal(model(rows(6)).full_tensor(), expected)


def test_the_driver_draws_the_numbers_that_it_would_draw_alone():
    module = nn.Linear(3, 2)
    model = wrap(module)
    torch.manual_seed(7)
    model(rows(6))
    found = torch.rand(3)
    torch.manual_seed(7)
    module(rows(6))
    assert torch.equal(found, torch.rand(3))


def test_default_dtype_and_determinism():
    def forward(self, x):
        assert torch.are_deterministic_algorithms_enabled()
        return self.layer(x) + torch.zeros(2)

    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert_same(lambda: Forward(forward), lambda model: step(model, rows(5).double()))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(mode=False)


def test_a_model_trained_by_two_wrappers_in_turn():
    module = nn.Linear(3, 2)
    twin = copy.deepcopy(module)
    loop = training([((rows(5),), rows(5, 2, seed=1))] * 2, F.mse_loss)
    first, second = wrap(module), wrap(module)
    compare((loop(first), loop(second)), (loop(twin), loop(twin)))
    compare(module.weight.grad, twin.weight.grad)
