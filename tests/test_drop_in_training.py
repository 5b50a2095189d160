"""What `torch.nn.DataParallel` is tested for by PyTorch itself holds here, too: gradients, layouts, lifetimes."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import REPLICAS, assert_same, compare, wrap
from test_drop_in import Calls, rows


@pytest.fixture(params=REPLICAS)
def replicas(request):
    wrap(nn.Linear(1, 1), request.param)
    return request.param


@contextlib.contextmanager
def without_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---------------------------------------------------------------------- lifetimes


def test_a_step_and_a_model_leave_nothing_for_the_garbage_collector(replicas):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, unused=None):
            return {"out": self.layer(x), "same": x}

    def live():
        model = wrap(Net(), replicas)
        gone = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.module.layer.weight)]
        x = rows(7).requires_grad_()
        output = model(x, unused={"name": "x"})
        loss = F.mse_loss(output["out"], rows(7, 2))
        loss.backward()
        with torch.no_grad():
            evaluated = model.eval()(rows(7))
        return gone + [weakref.ref(value) for value in (x, output["out"], loss, evaluated["out"])]

    live()  # what the first call of all imports and remembers is not the step's
    with without_garbage_collector():
        assert [reference() for reference in live()] == [None] * 7
        assert gc.collect() == 0


# ---------------------------------------------------------------------- gradients


def test_buffers_that_require_grad_in_a_module_without_parameters(replicas):
    module = Calls(lambda self, x: x * self.scale + self.shift)
    module.register_buffer("scale", rows(10, dtype=torch.float64).requires_grad_())
    module.register_buffer("shift", rows(10, dtype=torch.float64))
    model, x = wrap(module, replicas), rows(4, 10, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda scale: model(x), (module.scale,))


def test_first_and_second_derivatives_pass_numerical_checks(replicas):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model, x = wrap(module, replicas), rows(4, dtype=torch.float64).requires_grad_()
    wanted = (x, module[0].weight, module[2].bias)
    assert torch.autograd.gradcheck(lambda *_: model(x), wanted)
    assert torch.autograd.gradgradcheck(lambda *_: model(x), wanted)


def test_a_penalty_on_the_gradient_of_a_linear_layer():
    def loop(model):
        x = torch.ones(4, 4, requires_grad=True)
        output = model(x)
        (gradient,) = torch.autograd.grad(output, x, torch.ones(4, 1), create_graph=True)
        gradient.mean().backward()

    assert_same(lambda: nn.Linear(4, 1), loop)


def test_scattering_and_gathering_let_gradients_through_to_the_rows():
    def loop(model):
        x = rows(5).requires_grad_()
        output = model(x)
        output.backward(rows(5, seed=1))
        first = x.grad.clone()
        model(x)[:2].sum().backward()
        return output, first, x.grad

    assert_same(lambda: Calls(lambda self, x: x * 1), loop)


@pytest.mark.parametrize("word", ["stack", "mean", "sum"])
def test_scalars_of_the_replicas_are_what_the_user_says(word, replicas):
    module = Calls(lambda self, x: self.layer(x).sum(), layer=nn.Linear(3, 2))
    x = rows(2 * replicas)
    shards = torch.stack([module(part) for part in x.chunk(replicas)])
    expected = {"stack": shards, "mean": shards.mean(), "sum": shards.sum()}[word]
    output = wrap(module, replicas, scalar_outputs=word)(x)
    compare(output, expected)
    weights = torch.ones_like(expected).cumsum(0) if expected.ndim else None
    parameters = list(module.parameters())
    compare(torch.autograd.grad(output, parameters, weights), torch.autograd.grad(expected, parameters, weights))


@pytest.mark.parametrize("sparse", [True, False])
def test_embedding_gradients(sparse):
    def loop(model):
        tokens = torch.randint(10, (20, 5), generator=torch.Generator().manual_seed(0))
        output = model(tokens)
        output.sum().backward()
        return output

    assert_same(lambda: nn.Embedding(10, 5, sparse=sparse), loop)


def test_complex_parameters_inputs_and_outputs():
    def make():
        module = Calls(lambda self, x: x * self.weight + self.weight.conj())
        module.weight = nn.Parameter(torch.randn(10, dtype=torch.complex64))
        return module

    def loop(model):
        x = torch.complex(rows(5, 10), rows(5, 10, seed=1)).requires_grad_()
        output = model(x)
        output.abs().square().sum().backward()
        return output, x.grad

    assert_same(make, loop)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_layers_that_flatten_their_parameters_in_forward(cell, batch_first, given):
    """The hidden state has its rows in dimension 1, whatever the sequence has."""

    def compute(self, x, state=None):
        self.rnn.flatten_parameters()
        return self.rnn(x, state)

    def make():
        return Calls(compute, rnn=cell(3, 4, 2, batch_first=batch_first, bidirectional=True))

    def loop(model):
        x = rows(5, 6) if batch_first else rows(6, 5)
        x = x[..., None].expand(*x.shape, 3)
        state = rows(4, 5, 4, seed=2).requires_grad_()
        arguments = (x, (state, state) if cell is nn.LSTM else state) if given else (x,)
        with torch.no_grad():
            evaluated = model(*arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=10)
        output, hidden = model(*arguments)
        F.mse_loss(output, torch.zeros_like(output)).backward()
        optimizer.step()
        return evaluated, output, hidden, state.grad

    options = {"dim": 0 if batch_first else 1}
    assert_same(make, loop, in_dims={1: 1} if given else None, **options)


@pytest.mark.parametrize("container", [nn.ParameterList, nn.ParameterDict])
def test_parameter_lists_and_dicts_hold_parameters_in_every_replica(container):
    def compute(self, x):
        first, second = self.data.values() if isinstance(self.data, nn.ParameterDict) else self.data
        assert all(isinstance(each, nn.Parameter) and each.requires_grad for each in (first, second))
        return x * first + second

    def make():
        values = [nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))]
        return Calls(
            compute, data=container(values if container is nn.ParameterList else {"0": values[0], "1": values[1]})
        )

    def loop(model):
        output = model(rows(8))
        output.square().sum().backward()
        return output

    assert_same(make, loop)


# ---------------------------------------------------------------------- layouts and dtypes


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("last", [(False, False), (True, False), (True, True)], ids=str)
def test_gradients_have_the_strides_of_their_parameters(last, dtypes):
    def make():
        formats = [torch.channels_last if here else torch.contiguous_format for here in last]
        first, second = (
            nn.Conv2d(*channels, 2).to(memory_format=memory_format, dtype=dtype)
            for channels, memory_format, dtype in zip([(8, 16), (16, 4)], formats, dtypes, strict=True)
        )
        return Calls(lambda self, x: self.second(self.first(x).to(dtypes[1])), first=first, second=second)

    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strides = []
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(rows(6, 8, 4, 4)).float(), rows(6, 4, 2, 2)).backward()
            optimizer.step()
            strides += [(parameter.stride(), parameter.grad.stride()) for parameter in model.parameters()]
        assert all(own == gradient for own, gradient in strides)
        return strides

    tolerance = 3e-2 if torch.bfloat16 in dtypes else None
    assert_same(make, loop, tolerance=tolerance)


def test_permuted_and_strided_parameters():
    def make():
        module = Calls(lambda self, x: x @ self.turned + self.thin)
        module.turned = nn.Parameter(torch.randn(4, 3).t())
        module.thin = nn.Parameter(torch.randn(8)[::2])
        return module

    def loop(model):
        strides = []
        for seed in range(2):
            F.mse_loss(model(rows(5, seed=seed)), rows(5, 4)).backward()
            strides += [parameter.grad.stride() for parameter in model.parameters()]
        return strides

    assert_same(make, loop)


def test_autocast_around_and_inside_of_forward():
    class Inside(nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return super().forward(x)

    def loop(model):
        output = model(rows(8, 8))
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        return output

    def around(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loop(model)

    assert_same(lambda: Inside(8, 8), loop, tolerance=2e-2)
    assert_same(lambda: nn.Linear(8, 8), around, tolerance=2e-2)


# ---------------------------------------------------------------------- what forward does to the module


def test_attributes_that_forward_changes_are_there_at_the_next_call():
    def compute(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.layer(x) * self.calls

    def loop(model):
        outputs = [model(rows(5)) for _ in range(3)]
        return outputs, model.calls

    assert_same(lambda: Calls(compute, layer=nn.Linear(3, 2)), loop)


def test_hooks_of_the_module_and_of_its_parts_change_what_they_change_bare():
    def make():
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        module[0].register_forward_pre_hook(lambda layer, args: (args[0] * 2,))
        module[1].register_forward_hook(lambda layer, args, output: output + 1)
        module[0].register_full_backward_hook(lambda layer, ins, outs: (ins[0] * 3,))
        module.register_forward_hook(lambda layer, args, output: output.tanh())
        module[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return module

    def loop(model):
        x = rows(7).requires_grad_()
        output = model(x)
        F.mse_loss(output, rows(7, 2)).backward()
        return output, x.grad

    assert_same(make, loop)
