"""Loops as people write them: several forwards and backwards, accumulation, precision, schedules, hooks, gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parity import assert_same, compare, wrap


def rows(count, width=3, seed=0, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_net():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def make_double_net():
    return make_net().double()


def test_gradients_add_up_over_several_steps_until_they_are_cleared():
    def loop(model):
        norms = []
        for step in range(6):
            F.mse_loss(model(rows(5, seed=step)), rows(5, 2, seed=9)).backward()
            if step % 3 == 2:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                model.zero_grad(set_to_none=step == 2)
        return norms

    assert_same(make_net, loop)


def test_gradients_of_one_step_do_not_change_with_the_next():
    def loop(model):
        kept = []
        for step in range(3):
            model.zero_grad()
            model(rows(5, seed=step)).sum().backward()
            kept.append([parameter.grad for parameter in model.parameters()])
        return kept

    assert_same(make_net, loop)


def test_several_forwards_before_one_backward():
    def loop(model):
        outputs = [model(rows(count, seed=count)) for count in (5, 7, 1)]
        sum(output.square().mean() for output in outputs).backward()
        return outputs

    assert_same(make_net, loop)


def test_two_losses_of_one_output_with_a_backward_each():
    def loop(model):
        output = model(rows(7))
        first, second = output.square().mean(), output.exp().mean()
        first.backward(retain_graph=True)
        second.backward()
        return first, second

    assert_same(make_net, loop)


def test_the_same_loss_backwards_three_times():
    def loop(model):
        loss = model(rows(7)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return loss

    assert_same(make_net, loop)


def test_backward_through_a_vector_and_through_many_tensors():
    def loop(model):
        output = model(rows(5))
        output.backward(torch.arange(10.0).view(5, 2), retain_graph=True)
        torch.autograd.backward([output[:, 0], output[:, 1]], [torch.ones(5), torch.arange(5.0)])

    assert_same(make_net, loop)


def test_a_loss_of_plain_and_sharded_parts():
    def loop(model):
        shared = torch.ones(2, requires_grad=True)
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        loss = F.mse_loss(model(rows(5)) * shared, rows(5, 2, seed=1)) + 0.1 * penalty
        loss.backward()
        return loss, shared.grad

    assert_same(make_net, loop)


def test_autograd_grad_on_parameters_and_inputs():
    def loop(model):
        x = rows(5).requires_grad_()
        parameters = list(model.parameters())
        loss = model(x).square().mean()
        some = torch.autograd.grad(loss, [parameters[0], x], retain_graph=True)
        rest = torch.autograd.grad(loss, parameters[1:])
        return some, rest

    assert_same(make_net, loop)


def test_input_gradients_alone():
    """The attack of FGSM: only the input's gradient is asked for, the parameters' stay None."""

    def loop(model):
        x = rows(5).requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1, 1])), x)
        return x + 0.1 * gradient.sign()

    assert_same(make_net, loop)
    assert_same(lambda: make_net().requires_grad_(requires_grad=False), loop)


def test_retain_grad_on_an_output():
    def loop(model):
        output = model(rows(5))
        output.retain_grad()
        output.square().mean().backward()
        return output.grad

    assert_same(make_net, loop)


def test_hooks_on_parameters_are_called_once_on_the_total():
    def loop(model):
        seen = {"weight": [], "bias": []}
        weight, bias = list(model.parameters())[:2]
        weight.register_hook(lambda grad: seen["weight"].append(grad.clone()) or grad * 2)
        bias.register_post_accumulate_grad_hook(lambda parameter: seen["bias"].append(parameter.grad.clone()))
        for step in range(2):
            model(rows(5, seed=step)).square().mean().backward()
        return seen

    assert_same(make_net, loop)


def test_hooks_on_outputs():
    def loop(model):
        seen = []
        output = model(rows(5))
        output.register_hook(lambda grad: seen.append(grad.clone()) or grad * 3)
        output.mean().backward()
        return seen

    assert_same(make_net, loop)


def test_an_optimizer_step_inside_of_the_backward():
    def loop(model):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
        for seed in range(3):
            model(rows(5, seed=seed)).square().mean().backward()
        for hook in hooks:
            hook.remove()  # else parameters and optimizers would keep each other for ever, bare too

    assert_same(make_net, loop)


def test_frozen_parameters_and_parameters_unused_in_a_step():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
            self.body.bias.requires_grad_(requires_grad=False)

        def forward(self, x, left):
            return (self.left if left else self.right)(self.body(x))

    def loop(model):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
        for step in range(6):
            optimizer.zero_grad()
            model(rows(5, seed=step), step < 3).square().mean().backward()
            optimizer.step()

    assert_same(TwoHeads, loop)


def test_a_layer_that_only_some_rows_go_through():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.rare = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            out = self.layer(x)
            chosen = (x[:, 0] > 0).nonzero()[:, 0]
            return out.index_add(0, chosen, self.rare(x[chosen])) if len(chosen) else out

    def loop(model):
        x = rows(5)
        x[:, 0] = torch.tensor([-1.0, -1, -1, -1, 1])
        model(x).square().mean().backward()

    assert_same(Routed, loop)


def test_a_branch_that_all_rows_decide_on_together_is_refused():
    class Deciding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.rare = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            out = self.layer(x)
            return out + self.rare(x) if bool((x[:, 0] > 0).any()) else out

    x = rows(5)
    x[:, 0] = torch.tensor([-1.0, -1, -1, -1, 1])
    with pytest.raises(ValueError, match=r"output .*depend on the other rows"):
        wrap(Deciding())(x)


def test_train_eval_no_grad_and_inference_mode():
    def loop(model):
        results = [model(rows(5))]
        with torch.no_grad():
            results.append(model(rows(5)))
        model.eval()
        results.append(model(rows(5)))
        with torch.inference_mode():
            output = model(rows(5))
            results.append(output.softmax(1).clone())
            assert output.is_inference()
        model.train()
        results[0].sum().backward()
        return results

    assert_same(make_net, loop)


def test_grad_mode_inside_of_no_grad():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (grad,) = torch.autograd.grad(self.layer(x).square().sum(), x)
            return grad

    def loop(model):
        with torch.no_grad():
            return model(rows(5))

    assert_same(Inner, loop)


def test_gradients_with_respect_to_parameters_inside_of_forward():
    """MAML: forward adapts copies of the parameters by their gradients."""

    class Adapting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, support, targets):
            inner = F.mse_loss(self.layer(support), targets)
            grads = torch.autograd.grad(inner, list(self.parameters()), create_graph=True)
            weight, bias = (p - 0.1 * g for p, g in zip(self.parameters(), grads, strict=True))
            return F.linear(x, weight, bias)

    def loop(model):
        out = model(rows(5), rows(4, seed=1), rows(4, 2, seed=2))
        out.square().mean().backward()
        return out

    assert_same(Adapting, loop, in_dims=(0, None, None))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_of_the_model(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x):
            hidden = self.first(x)
            return checkpoint(lambda h: self.second(h.tanh()), hidden, use_reentrant=reentrant)

    def loop(model):
        model(rows(5)).square().mean().backward()

    assert_same(Checkpointed, loop)


def test_autocast_in_bfloat16():
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(rows(5, seed=step))
                loss = F.cross_entropy(output, torch.tensor([0, 1, 0, 1, 1]))
            loss.backward()
            optimizer.step()
            outputs.append((output, loss))
        return outputs

    # Gradients of single rows are rounded to 8 bits before they are summed, in whatever order.
    assert_same(make_net, loop, tolerance=2e-2)


def test_a_loss_in_forward_under_autocast():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x, y):
            return F.mse_loss(self.net(x), y)

    def loop(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(rows(7), rows(7, 2, seed=1))
        loss.backward()
        return loss

    assert_same(WithLoss, loop, tolerance=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler(dtype):
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=dtype is torch.float16):
                loss = F.mse_loss(model(rows(5, seed=step)), rows(5, 2, seed=9))
            if step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss)
        return losses, scaler.get_scale()

    assert_same(make_net, loop, tolerance=2e-3 if dtype is torch.float16 else None)


@pytest.mark.parametrize("wrap_first", [False, True], ids=["optimizer first", "wrapper first"])
def test_schedules(wrap_first):
    x, y = rows(5), rows(5, 2, seed=1)

    def train(model, optimizer):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            plateau.step(loss)

    bare = make_net()
    module = copy.deepcopy(bare)
    train(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    if wrap_first:
        model = wrap(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = wrap(module)
    train(model, optimizer)
    compare(dict(module.named_parameters()), dict(bare.named_parameters()))


def test_sharpness_aware_steps():
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = rows(5), rows(5, 2, seed=1)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                ups = [0.05 * parameter.grad for parameter in model.parameters()]
                for parameter, up in zip(model.parameters(), ups, strict=True):
                    parameter.add_(up)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter, up in zip(model.parameters(), ups, strict=True):
                    parameter.sub_(up)
            optimizer.step()

    assert_same(make_double_net, lambda model: loop(_Doubled(model)))


class _Doubled:
    """A model that is given float32 rows in a loop, in double precision."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x.double()).float()

    def parameters(self):
        return self.model.parameters()


def test_weight_clipping_through_data_and_moving_averages():
    def loop(model):
        module = getattr(model, "module", model)
        average = copy.deepcopy(model)
        swa = torch.optim.swa_utils.AveragedModel(module)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            model(rows(5, seed=step)).mean().backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)
            swa.update_parameters(module)
        return average(rows(5)), swa(rows(5)), model(rows(5))

    assert_same(make_net, loop)


def test_two_wrapped_models_chained():
    def loop(model):
        encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 2)
        torch.manual_seed(3)
        for parameter in (*encoder.parameters(), *decoder.parameters()):
            nn.init.normal_(parameter)
        wrapped = hasattr(model, "module")
        first = wrap(encoder) if wrapped else encoder
        second = wrap(decoder) if wrapped else decoder
        x = rows(7).requires_grad_()
        output = second(first(x).tanh())
        F.mse_loss(output, rows(7, 2, seed=1)).backward()
        return output, x.grad, [p.grad for p in (*encoder.parameters(), *decoder.parameters())]

    assert_same(make_net, loop, replicas=[2])


def test_a_gan():
    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def loop(model):
        pair = getattr(model, "module", model)
        wrapped = hasattr(model, "module")
        generator, critic = (wrap(pair.generator), wrap(pair.critic)) if wrapped else (pair.generator, pair.critic)
        g_steps = torch.optim.Adam(generator.parameters(), lr=0.01)
        d_steps = torch.optim.Adam(critic.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            real, noise = rows(5, seed=step), rows(5, 2, seed=10 + step)
            fake = generator(noise)
            d_steps.zero_grad()
            d_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
            d_loss.backward()
            d_steps.step()
            g_steps.zero_grad()
            g_loss = F.softplus(-critic(fake)).mean()
            g_loss.backward()
            g_steps.step()
            losses.append((d_loss, g_loss))
        return losses

    assert_same(Gan, loop, replicas=[2])


def test_anomaly_detection_and_profiling():
    def loop(model):
        with torch.autograd.detect_anomaly(check_nan=True), torch.autograd.profiler.profile():
            loss = model(rows(5)).square().mean()
            loss.backward()
        return loss

    assert_same(make_net, loop, replicas=[2])
