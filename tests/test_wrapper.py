"""The wrapper is a `torch.nn.DataParallel` to all who ask, and the module to all who use it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import evenly
from evenly import DataParallel
from parity import assert_same, compare, wrap


def rows(count, width=3, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.config = {"width": 3}

    def forward(self, x):
        return self.fc(x)

    def generate(self, count):
        return self(torch.ones(count, 3))


def test_it_is_a_data_parallel_with_its_attributes():
    model = wrap(Net())
    assert isinstance(model, nn.DataParallel)
    assert isinstance(model.module, Net)
    assert model.device_ids == [torch.device("cpu")] * 2
    assert model.output_device == torch.device("cpu")
    assert model.dim == 0


def test_methods_and_attributes_of_the_module():
    model = wrap(Net())
    assert model.config is model.module.config
    assert model.fc.weight is model.module.fc.weight
    compare(model.generate(4), model.module.generate(4))
    with pytest.raises(AttributeError, match="nor has the 'Net'"):
        _ = model.missing


def test_what_is_assigned_to_the_wrapper_counts_at_the_next_call():
    model = wrap(Net())
    model(rows(5))
    model.module = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0))
    compare(model(rows(5)), model.module(rows(5)))
    model.module = nn.Linear(3, 4)
    model.split = [3, 1]
    compare(model(rows(5)), model.module(rows(5)))
    model.module = nn.Bilinear(3, 3, 2)
    model.in_dims, model.out_dims, model.sync_batchnorm = (0, 0), 0, True
    compare(model(rows(5), rows(5)), model.module(rows(5), rows(5)))
    model.split, model.device_ids = None, ["cpu"] * 3
    compare(model(rows(5), rows(5)), model.module(rows(5), rows(5)))
    assert len(model.report()) == 3


def test_wrapped_twice_and_wrapped_inside_of_another_module():
    model = wrap(wrap(Net()))
    assert isinstance(model.module, Net)
    outer = nn.Sequential(nn.Linear(3, 3), model, nn.Linear(2, 1))
    twin = copy.deepcopy(nn.Sequential(outer[0], model.module, outer[2]))
    for net in (outer, twin):
        F.mse_loss(net(rows(5)), rows(5, 1)).backward()
    assert [p.grad is not None for p in outer.parameters()] == [True] * 6
    compare([p.grad for p in outer.parameters()], [p.grad for p in twin.parameters()])


def test_a_wrapper_around_a_module_that_holds_a_wrapper():
    inner = Net()
    model = wrap(nn.Sequential(wrap(inner), nn.Linear(2, 1)))
    compare(model(rows(5)), model.module[1](inner(rows(5))))


def test_a_wrapper_inside_of_a_checkpoint_inside_of_a_wrapper():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = wrap(Net())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = wrap(Checkpointed())
    model(rows(5)).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    expected = model.module.inner.module(rows(5)).square().sum()
    compare(found, list(torch.autograd.grad(expected, list(model.parameters()))))


def test_states_go_both_ways_under_clean_names():
    model, twin = wrap(Net()), Net()
    assert list(model.state_dict()) == list(twin.state_dict()) == ["fc.weight", "fc.bias"]
    twin.load_state_dict(model.state_dict())
    compare(model(rows(5)), twin(rows(5)))
    model.load_state_dict({f"module.{name}": value + 1 for name, value in twin.state_dict().items()})
    compare(dict(model.state_dict()), {name: value + 1 for name, value in twin.state_dict().items()})


def test_copies_pickles_and_saved_models_work():
    model = wrap(Net())
    model(rows(5))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert isinstance(other, DataParallel)
        compare(other(rows(5)), model.module(rows(5)))
        with torch.no_grad():
            other.fc.weight.zero_()
    assert model.fc.weight.any()


def test_without_devices_it_runs_the_module():
    model = DataParallel(Net())
    compare(model(rows(5)), model.module(rows(5)))
    compare(DataParallel(Net(), device_ids=["cpu"]).generate(2).shape, torch.Size([2, 2]))


def test_the_function_runs_a_module_once():
    module = Net()
    compare(evenly.data_parallel(module, rows(5), ["cpu", "cpu"]), module(rows(5)))
    compare(evenly.data_parallel(module, (rows(5),), ["cpu", "cpu"], module_kwargs={}), module(rows(5)))


def test_several_threads_call_one_model():
    model = wrap(Net())
    found = {}

    def run(number):
        output = model(rows(5, seed=number))
        found[number] = output.full_tensor(), torch.autograd.grad(output.square().sum(), list(model.parameters()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (output, gradients) in found.items():
        expected = model.module(rows(5, seed=number))
        compare(output, expected)
        compare(gradients, torch.autograd.grad(expected.square().sum(), list(model.parameters())))


def test_outputs_that_are_never_used_leave_nothing():
    model = wrap(Net())
    outputs = weakref.WeakSet()
    for seed in range(20):
        outputs.add(model(rows(5, seed=seed)))
    gc.collect()
    assert not outputs


def test_the_report_counts_rows():
    model = wrap(Net())
    before = [replica.rows for replica in model.report()]
    model(rows(5))
    after = model.report()
    assert [replica.replica for replica in after] == [0, 1]
    assert [replica.rows - old for replica, old in zip(after, before, strict=True)] == [3, 2]
    model(rows(1))
    wrap(Net())(rows(5))  # another model on the same devices
    assert [replica.rows - old.rows for replica, old in zip(model.report(), after, strict=True)] == [4, 2]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"device_ids": []}, "device_ids is empty"),
        ({"device_ids": "cpu"}, "device_ids must be a list"),
        ({"device_ids": ["cpu", "mars"]}, r"device_ids\[1\] is 'mars'"),
        ({"device_ids": ["cpu", 99]}, r"device_ids\[1\] is 99.*\['cpu'\] \* n"),
        ({"device_ids": ["cpu", None]}, r"device_ids\[1\] is None"),
        ({"device_ids": ["cpu"] * 2, "output_device": "meta"}, "output_device"),
        ({"device_ids": ["cpu"] * 2, "split": [1, 2, 3]}, "split has 3 weights for 2 devices"),
        ({"device_ids": ["cpu"] * 2, "split": [-1, 2]}, "split"),
        ({"device_ids": ["cpu"] * 2, "split": [0, 2]}, "split"),
        ({"device_ids": ["cpu"] * 2, "scalar_outputs": "median"}, "scalar_outputs"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        DataParallel(Net(), **options)


def test_a_function_is_refused():
    with pytest.raises(TypeError, match="got a function"):
        wrap(lambda x: x)


def test_a_module_that_cannot_travel_is_refused_by_its_path_and_works_afterwards():
    model = wrap(Net())
    model.module.guard = {"lock": threading.Lock()}
    with pytest.raises(TypeError, match=r"model\.guard\[.lock.\] cannot be sent"):
        model(rows(5))
    del model.module.guard
    compare(model(rows(5)), model.module(rows(5)))


def test_an_argument_that_cannot_travel_is_refused_by_its_path_and_the_next_call_works():
    class WithLock(Net):
        def forward(self, x, lock=None):
            return self.fc(x)

    model = wrap(WithLock())
    with pytest.raises(TypeError, match=r"lock.* cannot be sent"):
        model(rows(5), lock=threading.Lock())
    compare(model(rows(5)), model.module(rows(5)))


@pytest.mark.parametrize("where", [0, 1])
def test_an_exception_in_one_shard_keeps_its_type_and_the_next_call_works(where):
    class Failing(Net):
        def forward(self, x):
            if bool((x == 99).any()):
                raise LookupError("99 is not here", 99)
            return self.fc(x)

    model = wrap(Failing())
    bad = rows(4)
    bad[3 * where] = 99
    for _ in range(2):
        with pytest.raises(LookupError, match="99 is not here"):
            model(bad)
        compare(model(rows(5)), model.module(rows(5)))


@pytest.mark.parametrize("where", [0, 1])
def test_an_exception_in_backward_keeps_its_type_and_the_next_call_works(where):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.bad = bool((x > 50).any())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.bad:
                raise LookupError("no gradient")
            return grad

    class FailingNet(Net):
        def forward(self, x):
            return Failing.apply(self.fc(x) * 0 + x[:, :2])

    model = wrap(FailingNet())
    bad = rows(4)
    bad[3 * where] = 99
    for _ in range(2):
        with pytest.raises(LookupError, match="no gradient"):
            model(bad).sum().backward()
        model.zero_grad()
        model(rows(4)).sum().backward()
        assert model.fc.bias.grad is not None


def test_a_saved_model_loads_in_a_process_without_replicas(tmp_path):
    model = wrap(nn.Linear(3, 2))
    torch.save(model, tmp_path / "model.pt")
    expected = model.module(torch.ones(2, 3)).sum().item()
    load = f"torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    code = f"import torch; print({load}(torch.ones(2, 3)).sum().item())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert float(found.stdout) == pytest.approx(expected)


def test_an_option_that_is_set_through_the_wrapper_counts_in_every_replica():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)
            self.temperature = 1.0

        def forward(self, x):
            return self.layer(x) / self.temperature

    def loop(model):
        before = model(x)
        model.temperature = 5.0
        return before, model(x), model.temperature

    x = torch.randn(5, 2)
    assert_same(Scaled, loop)
