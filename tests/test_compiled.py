"""Compiled and scripted modules and functions: in the wrapper, around it, beside it."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenly.checkpoint import clean_keys
from parity import REPLICAS, assert_same, compare, wrap

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def rows(count, width=3, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model, step=None):
    """A few steps on batches of changing sizes, and an evaluation."""
    step = step or (lambda model, x, y: F.mse_loss(model(x), y))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for seed, count in enumerate((5, 7, 6)):
        optimizer.zero_grad()
        loss = step(model, rows(count, seed=seed), torch.ones(count, 2))
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        seen.append(loss)
    model.eval()
    with torch.no_grad():
        seen.append(model(rows(5)))
    return seen


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    @torch.compile(backend="eager")
    def forward(self, x):
        return self.layer(x).tanh()


class WithFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.compiled = torch.compile(lambda x: x.tanh() * 2, backend="aot_eager")
        self.never = torch.compiler.disable(lambda x: x + 1)

    def forward(self, x):
        return self.never(self.compiled(self.layer(x)))


def part_compiled(backend):
    module = net()
    module[0] = torch.compile(module[0], backend=backend)
    return module


def compiled_in_place(backend):
    module = net()
    module.compile(backend=backend)
    return module


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [lambda backend: torch.compile(net(), backend=backend), part_compiled, compiled_in_place],
    ids=["the module", "a part of it", "in place"],
)
def test_a_compiled_module_trains_as_it_does_bare(make, backend):
    assert_same(lambda: make(backend), train)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.timeout(600)  # it starts the C++ compiler dozens of times, in each process
def test_a_module_compiled_by_inductor():
    assert_same(lambda: torch.compile(net()), train, replicas=[2])


@pytest.mark.parametrize("make", [Decorated, WithFunctions])
def test_compiled_functions_in_a_module(make):
    assert_same(make, train)


def test_what_needs_the_whole_batch_in_a_compiled_module():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x, y):
            return F.cross_entropy(self.second(self.norm(self.first(x)).tanh()), y, ignore_index=-1)

    def loop(model):
        loss = model(rows(7), torch.tensor([1, -1, 2, 0, -1, -1, -1]))
        loss.backward()
        return loss

    assert_same(lambda: torch.compile(Loss(), backend="aot_eager"), loop, sync_batchnorm=True)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["torch.compile", "in place"])
def test_a_compiled_wrapper_computes_what_it_does_uncompiled(how, backend, replicas):
    module = net()
    twin = copy.deepcopy(module)
    model = wrap(module, replicas)
    if how == "in place":
        model.compile(backend=backend)
        compiled = model
    else:
        compiled = torch.compile(model, backend=backend)
    compare(train(compiled), train(twin))
    compare([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("backward", [False, True], ids=["loss", "loss and backward"])
def test_a_compiled_step_around_the_wrapper(backward, backend, replicas):
    def step(model, x, y):
        loss = F.mse_loss(model(x).tanh(), y)
        if backward:
            loss.backward()
            loss = loss.detach()
        return loss

    module = net()
    twin = copy.deepcopy(module)
    model = wrap(module, replicas)
    compare(train(model, torch.compile(step, backend=backend)), train(twin, step))
    compare([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_a_step_that_must_be_one_graph_says_what_to_compile():
    model = wrap(net())

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        return model(x * 2)

    with pytest.raises(RuntimeError, match=r"DataParallel\(torch\.compile\(module\)\)"):
        step(rows(5))
    assert model(rows(5)).shape == (5, 2)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_checkpoints_of_a_compiled_module(replicas):
    plain, compiled = net(), torch.compile(net(), backend="eager")
    model = wrap(compiled, replicas)
    assert list(model.state_dict()) == list(compiled.state_dict())
    model.load_state_dict(plain.state_dict())
    compare(model(rows(5)), plain(rows(5)))
    train(model.train())
    plain.load_state_dict(clean_keys(model.state_dict()))
    compare(model(rows(5)), plain(rows(5)))
    other = wrap(net(), replicas)
    other.load_state_dict(model.state_dict())
    compare(other(rows(5)), plain(rows(5)))


@torch.jit.script
def scripted_gelu(x: torch.Tensor):
    return x * torch.sigmoid(1.702 * x)


class UsesScripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.activation = scripted_gelu

    def forward(self, x):
        return self.activation(scripted_gelu(self.layer(x)))


def test_a_scripted_function_in_a_module():
    assert_same(UsesScripted, train)


SCRIPT = """
import torch
from torch import nn
from evenly import DataParallel

@torch.jit.script
def square(x: torch.Tensor):
    return x * x

@torch.compile(backend="eager")
def double(x):
    return x * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return double(square(self.layer(x)))

net = Net()
x = torch.ones(5, 3)
out = DataParallel(net, device_ids=["cpu", "cpu"])(x)
assert torch.allclose(out.full_tensor(), net(x))
print("right")
"""


def test_compiled_and_scripted_functions_of_a_script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["right"], done.stderr


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, rows(2))], ids=["script", "trace"])
@pytest.mark.parametrize("place", ["the module", "a part of it"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_modules_are_refused_with_their_path_and_what_to_give_instead(make, place):
    if place == "the module":
        model, path = wrap(make(net())), "model "
    else:
        model, path = wrap(nn.Sequential(nn.Linear(3, 3), make(net()))), r"model\[1\] "
    with pytest.raises(TypeError, match=path + r"cannot be sent.*TorchScript.*Give the module that it was made from"):
        model(rows(5))
    compare(model.eval()(rows(1)), model.module(rows(1)))  # one row is one replica's, and that is the driver
