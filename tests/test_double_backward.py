"""Gradients of gradients are those of the bare module: penalties, path lengths, products with the Hessian."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import assert_same, wrap


def rows(count, width=3, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_net(width=1):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Softplus(), nn.Linear(4, width)).double()


@pytest.mark.parametrize("count", [2, 5, 9])
def test_the_penalty_of_wgan_gp(count):
    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        penalties = []
        for step in range(3):
            optimizer.zero_grad()
            real, fake = rows(count, seed=step), rows(count, seed=10 + step)
            mix = (0.3 * real + 0.7 * fake).requires_grad_()
            scores = model(mix)
            (gradient,) = torch.autograd.grad(scores, mix, torch.ones_like(scores), create_graph=True)
            penalty = (gradient.norm(2, dim=1) - 1).square().mean()
            loss = model(fake).mean() - model(real).mean() + 10 * penalty
            loss.backward()
            optimizer.step()
            penalties.append((penalty, gradient))
        return penalties

    assert_same(make_net, loop)


def test_path_lengths_of_stylegan():
    def loop(model):
        latents = rows(5).requires_grad_()
        images = model(latents)
        noise = rows(5, 2, seed=1)
        (gradient,) = torch.autograd.grad((images * noise).sum(), latents, create_graph=True)
        lengths = gradient.square().sum(1).sqrt()
        penalty = (lengths - lengths.mean().detach()).square().mean()
        (penalty + 0 * images[0, 0]).backward()
        return lengths, latents.grad

    assert_same(lambda: make_net(2), loop)


def test_gradients_of_parameters_with_a_graph():
    def loop(model):
        parameters = list(model.parameters())
        loss = F.mse_loss(model(rows(5)), rows(5, 1, seed=1))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        (loss + 0.1 * penalty).backward()
        return gradients

    assert_same(make_net, loop)


def test_products_with_the_hessian():
    def loop(model):
        parameters = list(model.parameters())
        loss = F.mse_loss(model(rows(7)), rows(7, 1, seed=1))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        products = []
        for seed in range(2):
            vectors = [torch.full_like(parameter, 1.0 + seed) for parameter in parameters]
            products.append(torch.autograd.grad(gradients, parameters, vectors, retain_graph=seed == 0))
        return products

    assert_same(make_net, loop)


def test_backward_with_create_graph_leaves_gradients_that_have_gradients():
    def loop(model):
        F.mse_loss(model(rows(5)), rows(5, 1, seed=1)).backward(create_graph=True)
        total = sum(parameter.grad.square().sum() for parameter in model.parameters())
        found = torch.autograd.grad(total, list(model.parameters()))
        model.zero_grad()  # or parameters and graph keep each other alive
        return found

    assert_same(make_net, loop)


def test_a_penalty_on_the_gradient_of_the_output():
    """What flowed into the output has a gradient, too: here it depends on a tensor outside of the model."""

    def loop(model):
        x, scale = rows(5).requires_grad_(), torch.ones(5, 1, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad((model(x) * scale).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return scale.grad, x.grad

    assert_same(make_net, loop)


def test_a_penalty_through_two_wrapped_models():
    def loop(model):
        torch.manual_seed(5)
        generator = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
        front = wrap(generator) if hasattr(model, "module") else generator
        x = rows(5).requires_grad_()
        (gradient,) = torch.autograd.grad(model(front(x)).sum(), x, create_graph=True)
        gradient.square().mean().backward()
        return x.grad, [parameter.grad for parameter in generator.parameters()]

    assert_same(make_net, loop, replicas=[2])


def test_losses_in_forward_and_several_outputs():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net(2)

        def forward(self, x):
            h = self.net(x)
            return {"loss": h.square().mean(), "total": h.exp().sum(), "h": h, "t": h.t()}

    def loop(model):
        x = rows(5).requires_grad_()
        out = model(x)
        value = out["loss"] + 0.1 * out["total"] + (out["h"].sin() * out["t"].t()).sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        gradient.square().sum().backward()
        return gradient, x.grad

    assert_same(Several, loop)


def test_a_shared_input_and_an_unused_parameter():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.unused = make_net(), nn.Linear(2, 2).double()

        def forward(self, x, style):
            return self.net(x * style)

    def loop(model):
        x, style = rows(5).requires_grad_(), rows(1, seed=2).requires_grad_()
        gradients = torch.autograd.grad(model(x, style).sum(), [x, style], create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()
        return gradients, x.grad, style.grad

    assert_same(Shared, loop)


def test_a_linear_model_whose_input_gradient_is_constant():
    def loop(model):
        x = rows(5).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient, x.grad

    assert_same(lambda: nn.Linear(3, 2).double(), loop)


def test_a_third_order_is_refused():
    model = wrap(make_net())
    x = rows(5).requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="third order"):
        second.sum().backward()
    model(x).sum().backward()
