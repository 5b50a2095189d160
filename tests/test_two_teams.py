"""Tensors of one set of replicas as arguments of a model on another."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenly.sharded.content import Parts, Shards
from parity import compare, wrap

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


@pytest.fixture
def models():
    """One model on two, and one on three replicas."""
    return wrap(linear(1), 2), wrap(linear(2), 3)


def both_at_once(monkeypatch, works):
    """Run works in threads of their own, each of which waits for the other where it asks for tensors of other replicas.

    If it held replicas of its own meanwhile, neither could go on.
    """
    together = threading.Barrier(2)
    results, failures = {}, []

    def meeting(method):
        def met(self, *args):
            with contextlib.suppress(threading.BrokenBarrierError):  # the other may have nothing to ask for
                together.wait(1)
            return method(self, *args)

        return met

    monkeypatch.setattr(Shards, "gather", meeting(Shards.gather))
    monkeypatch.setattr(Parts, "value", meeting(Parts.value))

    def run(number):
        try:
            results[number] = works[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    stuck = [thread for thread in threads if thread.is_alive()]
    monkeypatch.undo()
    assert not stuck, "each thread waits for the replicas that the other holds"
    if failures:
        raise failures[0]
    return results[0], results[1]


def test_two_threads_that_call_each_model_with_the_others_outputs(models, monkeypatch):
    first, second = models
    outputs = [model(X).detach() for model in models]
    found = both_at_once(monkeypatch, [lambda: first(outputs[1]), lambda: second(outputs[0])])
    compare(found[0], first.module(second.module(X).detach()))
    compare(found[1], second.module(first.module(X).detach()))


def test_two_threads_that_differentiate_through_both_models_in_opposite_order(models, monkeypatch):
    first, second = models

    def through(one, other):
        def work():
            x = X.clone().requires_grad_()
            loss = F.mse_loss(other(one(x).tanh()), X)
            return torch.autograd.grad(loss, [x, *one.parameters(), *other.parameters()])

        return work

    found = both_at_once(monkeypatch, [through(first, second), through(second, first)])
    monkeypatch.undo()
    expected = [through(first.module, second.module)(), through(second.module, first.module)()]
    compare([[torch.as_tensor(one) for one in each] for each in found], [list(each) for each in expected])


def test_a_loss_of_one_model_is_an_argument_of_another(models):
    first, second = models

    class Scaled(nn.Module):
        def forward(self, x, by):
            return x * by

    scaled = wrap(Scaled(), 3)
    loss = scaled(second(X), first(X).square().mean()).sum()
    loss.backward()
    bare = linear(1), linear(2)
    expected = (bare[1](X) * bare[0](X).square().mean()).sum()
    expected.backward()
    compare(loss, expected)
    compare(first.weight.grad, bare[0].weight.grad)
    compare(second.weight.grad, bare[1].weight.grad)
