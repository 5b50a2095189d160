"""What people do to parameters between steps, with the optimizer that they have, made before or after wrapping."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from parity import REPLICAS, assert_same, compare, wrap


def rows(count, width=3, seed=0, dtype=torch.float64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def bare(model):
    return getattr(model, "module", model)


def net():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def step(model, optimizer, seed, count=7):
    optimizer.zero_grad()
    output = model(rows(count, seed=seed))
    loss = F.mse_loss(output, rows(count, 2, seed=seed + 100))
    loss.backward()
    optimizer.step()
    return loss.detach()


OPTIMIZERS = {
    "SGD with Nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW, foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "Adam, one by one": functools.partial(torch.optim.Adam, lr=0.01, foreach=False, weight_decay=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "LBFGS": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrap_first", [False, True], ids=["before wrapping", "after wrapping"])
def test_optimizers_made_before_and_after_wrapping(name, wrap_first, replicas):
    def steps(model, optimizer):
        seen = []
        for seed, count in enumerate((7, 5, 8, 3)):

            def closure(seed=seed, count=count):
                optimizer.zero_grad()
                loss = F.mse_loss(model(rows(count, seed=seed)), rows(count, 2, seed=seed + 100))
                loss.backward()
                return loss

            seen.append(float(optimizer.step(closure).detach()))
        return seen

    module = net()
    twin = copy.deepcopy(module)
    optimizer = None if wrap_first else OPTIMIZERS[name](module.parameters())
    model = wrap(module, replicas)
    optimizer = optimizer or OPTIMIZERS[name](model.parameters())
    expected = OPTIMIZERS[name](twin.parameters())
    compare(steps(model, optimizer), steps(twin, expected), tolerance=1e-9)
    compare(dict(module.named_parameters()), dict(twin.named_parameters()), tolerance=1e-9)
    compare(optimizer.state_dict()["state"], expected.state_dict()["state"], tolerance=1e-8)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["SGD with Nesterov", "Adam, one by one", "AdamW, fused"])
def test_experts_of_which_each_step_uses_one_stay_where_the_bare_module_leaves_them(name, set_to_none):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(3, 4)
            self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

        def forward(self, x, expert):
            return self.experts[expert](self.trunk(x).tanh())

    def loop(model):
        optimizer = OPTIMIZERS[name](model.parameters())
        seen = []
        for seed, expert in enumerate((0, 1, 0, 2, 1)):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(rows(5, seed=seed), expert).square().mean().backward()
            seen.append([parameter.grad is None for parameter in model.parameters()])
            optimizer.step()
        return seen

    assert_same(lambda: Experts().double(), loop)


def test_freezing_and_unfreezing_under_an_optimizer_with_momentum():
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen = [step(model, optimizer, 0)]
        bare(model)[0].requires_grad_(requires_grad=False)
        seen += [step(model, optimizer, seed) for seed in (1, 2)]
        bare(model)[0].weight.requires_grad_()
        bare(model)[2].bias.requires_grad_(requires_grad=False)
        seen.append(step(model, optimizer, 3))
        model.requires_grad_()
        return [*seen, step(model, optimizer, 4)]

    assert_same(net, loop)


def test_a_new_head_joins_the_optimizer():
    def loop(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen = [step(model, optimizer, 0)]
        torch.manual_seed(3)
        bare(model)[2] = nn.Linear(6, 2, bias=False).double()
        optimizer.add_param_group({"params": bare(model)[2].parameters(), "lr": 0.1})
        seen += [step(model, optimizer, seed) for seed in (1, 2)]
        bare(model)[0].register_parameter("gain", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        bare(model)[0].register_forward_pre_hook(lambda layer, args: (args[0] * layer.gain,))
        optimizer.add_param_group({"params": [bare(model)[0].gain]})
        return [*seen, *(step(model, optimizer, seed) for seed in (3, 4))]

    assert_same(net, loop)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_checkpoint_between_steps(assign):
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        saved = copy.deepcopy(bare(model).state_dict())
        first = [step(model, optimizer, seed) for seed in (0, 1)]
        model.load_state_dict(saved, assign=assign)
        if assign:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        again = [step(model, optimizer, seed) for seed in (0, 1)]
        compare(first, again)
        return first, again

    assert_same(net, loop)


def test_half_precision_and_back_between_steps():
    def loop(model):
        seen = [model(rows(5))]
        model.half()
        seen.append(model(rows(5).half()))
        model.float()
        seen.append(model(rows(5).float()))
        seen[-1].square().sum().backward()
        return seen

    assert_same(net, loop)


def test_clamping_and_pruning_weights_by_data_after_every_step():
    def loop(model):
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
        seen = []
        for seed in range(3):
            seen.append(step(model, optimizer, seed))
            for parameter in model.parameters():
                parameter.data.clamp_(-0.2, 0.2)
                parameter.data[parameter.data.abs() < 0.02] = 0.0
                parameter.data = parameter.data.clone() if seed == 1 else parameter.data
        return seen, model(rows(5))

    assert_same(net, loop)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("of", ["the wrapper", "the module"])
@pytest.mark.parametrize("how", ["AveragedModel", "deepcopy"])
def test_moving_averages_are_the_bare_ones_and_evaluate_on_all_replicas(how, of, replicas):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()

    def run(model, source):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = (
            AveragedModel(source, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            if how == "AveragedModel"
            else copy.deepcopy(source).requires_grad_(requires_grad=False)
        )
        for seed in range(3):
            step(model, optimizer, seed)
            if how == "AveragedModel":
                average.update_parameters(source)
            else:
                with torch.no_grad():
                    for mine, theirs in zip(average.parameters(), source.parameters(), strict=True):
                        mine.lerp_(theirs, 0.1)
        update_bn([rows(6, seed=seed) for seed in range(3)], average)
        return average.eval()(rows(5)), list(average.parameters()), list(average.buffers())

    module = make()
    model = wrap(module, replicas, sync_batchnorm=True)
    twin = make()
    compare(run(model, model if of == "the wrapper" else module), run(twin, twin))
