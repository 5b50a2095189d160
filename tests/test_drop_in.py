"""What `torch.nn.DataParallel` is tested for by PyTorch itself holds here, too: the calls that it takes.

`test_drop_in_training.py` has what it is tested for in training.
"""

from __future__ import annotations

import collections
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenly
from evenly import DataParallel
from parity import REPLICAS, assert_same, compare, wrap

pytestmark = pytest.mark.filterwarnings("ignore:there is no accelerator")


def rows(count, *width, seed=0, dtype=torch.float32):
    return torch.randn(count, *(width or (3,)), generator=torch.Generator().manual_seed(seed)).to(dtype)


class Calls(nn.Module):
    """A module, with parameters or without, that computes what it is told."""

    def __init__(self, compute, **modules):
        super().__init__()
        self.compute = compute
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.compute(self, *args, **kwargs)


def over(replicas, module, inputs, **options):
    return evenly.data_parallel(module, inputs, ["cpu"] * replicas, **options)


# ---------------------------------------------------------------------- the function


@pytest.fixture(params=REPLICAS)
def replicas(request):
    wrap(nn.Linear(1, 1), request.param)  # the processes outlive each call of the function
    return request.param


def test_the_function_gives_outputs_and_gradients(replicas):
    module, x = nn.Linear(10, 5), rows(20, 10)
    expected = module(x)
    output = over(replicas, module, x)
    compare(output, expected)
    parameters = list(module.parameters())
    compare(torch.autograd.grad(output.sum(), parameters), torch.autograd.grad(expected.sum(), parameters))


def test_several_inputs_with_gradients_a_number_and_a_keyword(replicas):
    module = Calls(lambda self, a, b, factor, c=0.0: factor * (a * b + c))
    a, b, c = (rows(5, 5, seed=seed).requires_grad_() for seed in range(3))
    for keywords in ({}, {"c": c.detach()}, {"c": c}):
        expected = module(a, b, 0.3, **keywords)
        wanted = [a, b, *(value for value in keywords.values() if value.requires_grad)]
        for count in (replicas, 1):
            output = over(count, module, (a, b, 0.3), module_kwargs=keywords)
            compare(output, expected)
            found = torch.autograd.grad(output.sum(), wanted)
            compare(found, torch.autograd.grad(expected.sum(), wanted, retain_graph=True))


def test_a_call_without_inputs(replicas):
    module = Calls(lambda self: torch.eye(2, 3) + 1)
    for output in (
        wrap(module, replicas)(),
        over(replicas, module, None),
        over(replicas, module, ()),
        over(1, module, ()),
    ):
        compare(output, torch.eye(2, 3) + 1)


def test_nested_inputs(replicas):
    x = rows(20)
    compare(over(replicas, Calls(lambda self, *given: given[1][0]), (x.cos(), (x.sin(), x), x.sin())), x.sin())


def test_nested_outputs_keep_their_types(replicas):
    def compute(self, x):
        return [x, (x.sin(), x.cos(), [x + 1]), x, collections.OrderedDict(a=x, b=[x.sin()])]

    module, x = Calls(compute), rows(3, 2)
    compare(over(replicas, module, x), module(x))


def test_output_device_and_devices_by_any_name(replicas):
    module, x = nn.Linear(3, 2), rows(7)
    for device in ("cpu", torch.device("cpu")):
        for devices in ([device] * replicas, (device,) * replicas):
            compare(evenly.data_parallel(module, x, devices, output_device=device), module(x))


def test_without_device_ids_and_with_one_device_it_runs_the_module():
    module, x = nn.Linear(3, 2), rows(4)
    compare(evenly.data_parallel(module, x), module(x))
    compare(DataParallel(module)(x), module(x))
    compare(DataParallel(module, device_ids=["cpu"])(x), module(x))


# ---------------------------------------------------------------------- calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_floating_dtype(dtype):
    assert_same(lambda: nn.Linear(10, 5).to(dtype), lambda model: model(rows(20, 10, dtype=dtype)))


@pytest.mark.parametrize("empty", [[], {}, (), None, [[], {}]])
def test_keywords_alone_with_empty_containers_beside_tensors(empty):
    def make():
        return Calls(lambda self, given: (self.layer(given["data"]), given["unused"]), layer=nn.Linear(3, 2))

    assert_same(make, lambda model: model(given={"data": rows(7), "unused": empty}))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0), (1, 3), (2, 3)])
def test_inputs_of_no_rows_no_columns_or_fewer_rows_than_replicas(shape):
    def make():
        return Calls(lambda self, x: (x * self.layer.weight.sum(), x.sum()), layer=nn.Linear(3, 2))

    def loop(model):
        output, total = model(torch.ones(shape))
        (output.sum() + total).backward()
        return output, total

    assert_same(make, loop)


def test_the_batch_in_dimension_one():
    def make():
        return Calls(lambda self, x, y: self.layer(x.movedim(1, 0)).movedim(0, 1) * y, layer=nn.Linear(4, 4))

    def loop(model):
        x = rows(4, 5).requires_grad_()
        output = model(x, rows(4, 5, seed=1))
        output.square().sum().backward()
        return output, x.grad

    assert_same(make, loop, dim=1)


def test_a_module_without_parameters():
    def loop(model):
        x = rows(5).requires_grad_()
        output = model(x)
        output.square().sum().backward()
        return output, x.grad

    assert_same(nn.ReLU, loop)
    assert_same(lambda: nn.BatchNorm1d(3, affine=False).eval(), loop)


def test_values_that_are_no_tensors():
    def make():
        return Calls(lambda self, x: (self.layer(x), "name", 3, None, True, {"depth": [1, 2]}), layer=nn.Linear(3, 2))

    assert_same(make, lambda model: model(rows(5)))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("parameters", [True, False])
def test_forward_sees_the_callers_grad_mode_even_if_nothing_requires_grad(enabled, parameters):
    def make():
        modules = {"layer": nn.Linear(3, 2).requires_grad_(requires_grad=False)} if parameters else {}
        return Calls(lambda self, x: (x * 2, torch.is_grad_enabled()), **modules)

    def loop(model):
        with torch.set_grad_enabled(enabled):
            output, seen = model(rows(5))
        assert seen is enabled
        return output, seen

    assert_same(make, loop)


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_frozen_module_that_differentiates_with_respect_to_its_input(create_graph):
    """As force fields do: forces are the gradient of an energy."""

    def forces(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.layer(positions).tanh().sum(1)
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=create_graph)
        return energy if create_graph else energy.detach(), -gradient

    def loop(model):
        energy, force = model(rows(5))
        if create_graph:
            (energy.sum() + force.square().sum()).backward()
        return energy, force

    assert_same(lambda: Calls(forces, layer=nn.Linear(3, 4).requires_grad_(requires_grad=False)), loop)


# ---------------------------------------------------------------------- the wrapper


@pytest.mark.parametrize(
    ("make", "error", "complaint"),
    [
        (lambda: None, TypeError, "wraps a torch.nn.Module, got a NoneType"),
        (lambda: nn.Linear, TypeError, "wraps a torch.nn.Module, got a type"),
        (lambda: torch.jit.script(nn.Linear(3, 2)), TypeError, "TorchScript.* Give the module that it was made from"),
        (lambda: nn.LazyLinear(2), ValueError, "weight has no shape yet: run one batch through the bare module first"),
    ],
    ids=["none", "class", "script", "lazy"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_modules_that_cannot_have_replicas_are_refused(make, error, complaint, replicas):
    with pytest.raises(error, match=complaint):
        over(replicas, make(), rows(4))


def test_no_devices_at_all_is_refused():
    with pytest.raises(ValueError, match="device_ids is empty"):
        evenly.data_parallel(nn.Linear(3, 2), rows(4), [])


def test_it_is_a_data_parallel_and_travels_as_one(replicas):
    model = wrap(nn.Linear(3, 2), replicas)
    assert isinstance(model, nn.DataParallel)
    expected = model(rows(5))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(twin, DataParallel)
        assert len(twin.device_ids) == replicas
        compare(twin(rows(5)), expected)


def test_states_fit_the_bare_module_and_those_of_torchs_wrapper():
    model = wrap(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    bare = copy.deepcopy(model.module)
    compare(dict(model.state_dict()), dict(bare.state_dict()))
    theirs = nn.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model.load_state_dict(theirs.state_dict())
    compare(dict(model.state_dict()), dict(theirs.module.state_dict()))


def test_zero_grad_inside_of_forward_clears_what_the_bare_module_clears():
    def compute(self, x):
        self.zero_grad()
        return self.layer(x)

    def loop(model):
        for seed in range(2):
            F.mse_loss(model(rows(5, seed=seed)), rows(5, 2)).backward()

    assert_same(lambda: Calls(compute, layer=nn.Linear(3, 2)), loop)


def test_an_exception_keeps_its_type_and_message_and_names_where_it_was(replicas):
    def compute(self, x):
        return {}["wonderful"] if bool((x == 99).any()) else self.layer(x)

    model = wrap(Calls(compute, layer=nn.Linear(3, 2)), replicas)
    x = rows(3 * replicas)
    x[-1] = 99  # in the last replica's shard
    with pytest.raises(KeyError, match="wonderful") as caught:
        model(x)
    assert f"replica {replicas - 1}" in str(caught.value.__cause__)
    assert 'return {}["wonderful"]' in str(caught.value.__cause__)
    compare(model(rows(5)), model.module(rows(5)))


def test_outputs_with_other_keys_on_another_replica_are_refused(replicas):
    def compute(self, x):
        output = self.layer(x)
        return {"a": output, "b": output} if bool((x == 99).any()) else {"a": output}

    model = wrap(Calls(compute, layer=nn.Linear(3, 2)), replicas)
    x = rows(3 * replicas)
    x[-1] = 99
    with pytest.raises(ValueError, match=r"output is a dict with \['a'\] for 3 rows, and a dict with \['a', 'b'\]"):
        model(x)
