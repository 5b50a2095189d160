"""Objects that travel by value to another process."""

from __future__ import annotations

import functools
import io
import pickle
import subprocess
import sys
import threading
import types
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from evenly.team.shipping import LeafRegistry, Parcel, ShippingError, pack, unpack


def ship(module: Any) -> tuple[Any, LeafRegistry, list[torch.Tensor], Parcel]:
    """Packs with a registry and unpacks with copies of the leaves, as another process would have them."""
    registry = LeafRegistry()
    parcel = pack(module, leaves=registry)
    leaves = [
        nn.Parameter(leaf.detach().clone(), leaf.requires_grad)
        if isinstance(leaf, nn.Parameter)
        else leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for leaf in registry
    ]
    copy = unpack(parcel.payload, [tensor.clone() for tensor in parcel.tensors], leaves)
    return copy, registry, leaves, parcel


def arrives(obj: Any) -> Any:
    parcel = pack(obj)
    return unpack(parcel.payload, [tensor.clone() for tensor in parcel.tensors])


def test_parameters_are_the_receivers_own() -> None:
    model = nn.Linear(2, 3)
    copy, registry, leaves, parcel = ship(model)
    assert registry[0] is model.weight
    assert copy.weight is leaves[0]
    assert copy.bias is leaves[1]
    assert parcel.tensors == []


def test_frozen_parameters_are_leaves_too() -> None:
    model = nn.Linear(2, 3).requires_grad_(False)
    copy, registry, leaves, _ = ship(model)
    assert len(registry) == 2
    assert copy.weight is leaves[0]


def test_tied_weights_stay_one_object() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    copy, registry, _, _ = ship(model)
    assert len(registry) == 1
    assert copy[0].weight is copy[1].weight


def test_a_parameter_in_a_plain_list_is_a_leaf() -> None:
    model = nn.Linear(2, 2)
    model.extra = [nn.Parameter(torch.ones(3)), torch.ones(2, requires_grad=True)]
    copy, registry, leaves, _ = ship(model)
    assert len(registry) == 4
    assert {id(leaf) for leaf in copy.extra} <= {id(leaf) for leaf in leaves}


def test_a_parameter_in_a_closure_is_a_leaf() -> None:
    scale = nn.Parameter(torch.tensor(3.0))
    model = nn.Linear(2, 2)
    model.act = lambda x: x * scale
    copy, registry, leaves, _ = ship(model)
    assert scale in registry
    assert copy.act.__closure__[0].cell_contents is leaves[registry.index(scale)]


def test_attributes_of_a_parameter_come_along() -> None:
    model = nn.Linear(2, 2)
    model.weight.no_decay = True
    model.weight.itself = model.weight
    copy, _, leaves, _ = ship(model)
    assert copy.weight is leaves[0]
    assert copy.weight.no_decay
    assert copy.weight.itself is copy.weight


def test_without_a_registry_leaves_arrive_as_new_leaves() -> None:
    x = torch.randn(3, requires_grad=True)
    parameter = nn.Parameter(torch.randn(2), requires_grad=False)
    got_x, got_parameter, again = arrives((x, parameter, x))
    assert got_x.is_leaf
    assert got_x.requires_grad
    assert torch.equal(got_x, x)
    assert again is got_x
    assert type(got_parameter) is nn.Parameter
    assert not got_parameter.requires_grad


def test_no_values_are_in_the_payload() -> None:
    parcel = pack(((torch.zeros(1000),), {"mask": torch.ones(1000, dtype=torch.bool)}))
    assert len(parcel.payload) < 100
    assert [tensor.numel() for tensor in parcel.tensors] == [1000, 1000]


def test_a_tensor_that_appears_twice_is_sent_once_and_stays_one() -> None:
    x = torch.randn(3)
    parcel = pack([x, {"again": x}])
    assert len(parcel.tensors) == 1
    first, second = unpack(parcel.payload, parcel.tensors)
    assert first is second["again"]


def test_values_with_a_graph_travel_without_it() -> None:
    y = torch.randn(3, requires_grad=True) * 2
    got = arrives(y)
    assert torch.equal(got, y)
    assert not got.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(3.0).expand(4, 3),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(3)),
        torch.randn(0, 3),
        torch.tensor(2.0),
        torch.arange(10.0).as_strided((3, 4), (1, 1)),
    ],
    ids=["t", "channels_last", "expanded", "gaps", "conj", "neg", "empty", "scalar", "overlapping"],
)
def test_any_strides_travel_compactly(tensor: torch.Tensor) -> None:
    (sent,) = pack(tensor).tensors
    assert torch.equal(sent, tensor)
    spanned = sum((size - 1) * stride for size, stride in zip(sent.shape, sent.stride(), strict=True)) + 1
    assert sent.numel() == 0 or spanned == sent.numel()
    assert not sent.is_conj()
    assert not sent.is_neg()


def test_channels_last_stays_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert arrives(x).is_contiguous(memory_format=torch.channels_last)


class Tagged(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
        lambda: torch.randn(3).as_subclass(Tagged),
        lambda: torch.empty(3, device="meta"),
    ],
    ids=["coo", "csr", "quantized", "subclass", "meta"],
)
def test_exotic_tensors_keep_their_kind(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    got = arrives(tensor)
    assert type(got) is type(tensor)
    assert (got.layout, got.dtype, got.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    if not tensor.is_meta:
        plain = torch.dequantize if tensor.is_quantized else torch.Tensor.to_dense
        assert torch.equal(plain(got), plain(tensor))


def test_a_sparse_tensors_parts_are_beside_the_payload() -> None:
    assert [tensor.shape for tensor in pack(torch.eye(3).to_sparse()).tensors] == [(2, 3), (3,)]


def test_python_attributes_of_a_tensor_are_kept() -> None:
    x = torch.randn(2)
    x.label = "x"
    parcel = pack(x)
    assert len(parcel.tensors) == 1
    assert unpack(parcel.payload, parcel.tensors).label == "x"


def same_output(model: nn.Module, *inputs: torch.Tensor) -> None:
    model.eval()
    copy, _, leaves, _ = ship(model)
    want, got = model(*inputs), copy(*inputs)
    want, got = (want[0], got[0]) if isinstance(want, tuple) else (want, got)
    assert torch.equal(want, got)
    got.sum().backward()
    assert any(leaf.grad is not None for leaf in leaves)


def test_an_lstm_computes_with_the_new_leaves() -> None:
    model = nn.LSTM(3, 4, num_layers=2)
    copy, _, leaves, _ = ship(model)
    assert {id(weight) for weight in copy._flat_weights} == {id(leaf) for leaf in leaves}
    same_output(model, torch.randn(5, 2, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm() -> None:
    model = weight_norm(nn.Linear(3, 4))
    model(torch.randn(2, 3))
    _, registry, _, _ = ship(model)
    assert len(registry) == 3
    same_output(model, torch.randn(2, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_spectral_norm() -> None:
    same_output(spectral_norm(nn.Linear(3, 4)), torch.randn(2, 3))


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrizations(norm: Any) -> None:
    same_output(norm(nn.Linear(3, 4)), torch.randn(2, 3))


def test_parametrized_twice() -> None:
    model = parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    model = parametrizations.orthogonal(model, "weight_ih_l0")
    same_output(model, torch.randn(5, 2, 3))


def test_a_parametrized_copy_can_be_unparametrized() -> None:
    copy, *_ = ship(parametrizations.weight_norm(nn.Linear(3, 4)))
    nn.utils.parametrize.remove_parametrizations(copy, "weight")
    assert type(copy) is nn.Linear


def test_parametrize_cached_works_on_the_copy() -> None:
    copy, *_ = ship(parametrizations.weight_norm(nn.Linear(3, 4)))
    with nn.utils.parametrize.cached():
        assert copy.weight is copy.weight


def test_a_module_class_defined_in_a_function() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    same_output(Local(), torch.randn(2, 3))


def test_hooks_travel() -> None:
    model = nn.Linear(3, 3)
    handle = model.register_forward_hook(lambda *args: args[-1] + 1)
    model.handle = handle
    same_output(model, torch.randn(2, 3))


def test_a_weak_reference_to_the_parent_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = weakref.ref(model)
    copy, *_ = ship(model)
    assert copy[0].parent() is copy


def test_known_modules_are_the_receivers_own() -> None:
    model, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    hook = functools.partial(torch.add, model)
    parcel = pack({"hook": hook, "module": model}, known_modules={id(model): 0})
    got = unpack(parcel.payload, modules=[theirs])
    assert got["hook"].args[0] is theirs
    assert got["module"] is theirs


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        Point(1, [2]),
        OrderedDict(a=1),
        {1, 2},
        slice(1, 2),
        torch.float16,
        torch.device("cpu"),
        range(3),
        ...,
        None,
    ],
    ids=repr,
)
def test_python_values_keep_their_type(value: Any) -> None:
    got = arrives(value)
    assert got == value
    assert type(got) is type(value)


def test_torchs_namespaces_travel_by_name() -> None:
    assert arrives(torch.ops) is torch.ops
    assert arrives(torch.backends.cudnn) is torch.backends.cudnn


def test_a_module_that_only_this_process_has_travels_by_value() -> None:
    module = types.ModuleType("made_here")
    exec("class Net:\n    def answer(self):\n        return 42\n", module.__dict__)
    sys.modules["made_here"] = module
    try:
        payload = pack((module.Net(), module)).payload
    finally:
        del sys.modules["made_here"]
    net = elsewhere(payload, "print(got[0].answer(), got[1].Net is type(got[0]))")
    assert net.split() == ["42", "True"]


def test_a_file_loaded_under_a_name_that_does_not_lead_to_it_travels_by_value(tmp_path: Path) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    file = tmp_path / "somewhere.py"
    file.write_text("def f():\n    return 'by value'\n")
    spec = spec_from_file_location("not_on_the_path", file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["not_on_the_path"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        payload = pack(module.f).payload
    finally:
        del sys.modules["not_on_the_path"]
    assert elsewhere(payload, "print(got(), got.__code__.co_filename)").split() == ["by", "value", str(file)]


def elsewhere(payload: bytes, code: str) -> str:
    """What `code` prints in another process that unpacked `payload` as `got`."""
    script = f"import sys\nfrom evenly.team.shipping import unpack\ngot = unpack(sys.stdin.buffer.read())\n{code}"
    result = subprocess.run([sys.executable, "-c", script], input=payload, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


MAIN = '''
import pickle, subprocess, sys, traceback
from dataclasses import dataclass
import torch
from torch import nn
from evenly.team.shipping import pack, unpack

STEPS = 3

@dataclass
class Result:
    value: int
    def plus(self):
        return self.value + STEPS

class Net(nn.Module):
    def forward(self, x):
        return Result(x + STEPS)

if __name__ == "__main__":
    plus = Result.plus
    child = subprocess.run([sys.executable, "-c", """
import pickle, sys
from evenly.team.shipping import pack, unpack
net = unpack(sys.stdin.buffer.read())
assert type(net).__module__ == "__main__" and net.forward.__code__.co_filename.endswith("script.py")
class Born:
    def answer(self):
        return 42
named, defined = pack([net(1), net(2)], homeward=True).payload, pack([net(1), Born()]).payload
assert len(named) < 200 < len(defined)
sys.stdout.buffer.write(pickle.dumps((named, defined)))
"""], input=pack(Net()).payload, stdout=subprocess.PIPE, check=True)
    named, defined = pickle.loads(child.stdout)
    results = unpack(named)
    first, born = unpack(defined)
    assert type(first) is Result
    subprocess.run([sys.executable, "-c", """
import sys
from evenly.team.shipping import unpack
assert unpack(sys.stdin.buffer.read()).answer() == 42
"""], input=pack(born).payload, check=True)
    assert results == [Result(4), Result(5)], results
    assert type(results[0]) is Result
    assert Result.plus is plus, "our class was overwritten"
    assert results[0].plus() == 7
    print("ok")
'''


def test_classes_of_a_script_travel_there_and_are_our_own_again_when_they_come_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MAIN)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.stdout == "ok\n", result.stderr


def test_functions_keep_file_names_and_lines() -> None:
    def fails() -> None:
        raise RuntimeError

    copy = arrives(fails)
    assert copy is not fails
    assert copy.__code__.co_filename == __file__
    assert list(copy.__code__.co_lines()) == list(fails.__code__.co_lines())
    assert copy.__code__ == fails.__code__


@dataclass
class Config:
    options: dict[str, Any]


def lock_in_a_submodule(model: nn.Module) -> None:
    model.encoder.lock = threading.Lock()


def file_in_a_lambda(model: nn.Module) -> None:
    file = io.TextIOWrapper(io.BytesIO())
    model.encoder.act = lambda x: (x, file)[0]


def generator_in_a_config(model: nn.Module) -> None:
    model.config = Config({"batches": [1, (i for i in range(3))]})


def lock_on_a_parameter(model: nn.Module) -> None:
    model.encoder[0].weight.owner = threading.Lock()


def lock_in_a_class(model: nn.Module) -> None:
    class Local:
        lock = threading.Lock()

    model.helper = Local()


LOCK = threading.Lock()


def global_of_a_method(model: nn.Module) -> None:
    class Local(nn.Module):
        def forward(self) -> None:
            LOCK.acquire()

    model.inner = Local()


def lock_in_a_hook(model: nn.Module) -> None:
    model.encoder.register_forward_hook(functools.partial(print, file=threading.Lock()))


@pytest.mark.parametrize(
    ("spoil", "path", "kind"),
    [
        (lock_in_a_submodule, "model.encoder.lock", "_thread.lock"),
        (file_in_a_lambda, "model.encoder.act (closure variable 'file')", "_io.TextIOWrapper"),
        (generator_in_a_config, "model.config.options['batches'][1]", "generator"),
        (lock_in_a_hook, ".keywords['file']", "_thread.lock"),
        (lock_on_a_parameter, "model.encoder[0].weight.owner", "_thread.lock"),
        (lock_in_a_class, ".lock cannot", "_thread.lock"),
        (global_of_a_method, "model.inner (its class ", "_thread.lock"),
        (global_of_a_method, "Local).forward (global 'LOCK')", "_thread.lock"),
    ],
)
def test_what_cannot_travel_is_named_with_its_path(spoil: Any, path: str, kind: str) -> None:
    model = nn.Module()
    model.encoder = nn.Sequential(nn.Linear(2, 2))
    spoil(model)
    with pytest.raises(ShippingError) as caught:
        pack(model, leaves=LeafRegistry(), name="model")
    message = str(caught.value)
    assert path in message
    assert f"it is a {kind}" in message
    assert "__getstate__" in message
    assert isinstance(caught.value, TypeError)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_with_what_to_give_instead() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ShippingError, match=r"^model\[0\] cannot .* Give the module that it was made from"):
        pack(model, leaves=LeafRegistry(), name="model")


def test_pruned_and_compiled_modules_travel() -> None:
    same_output(prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5), torch.ones(1, 3))
    same_output(torch.compile(nn.Linear(3, 3), backend="eager"), torch.ones(1, 3))


def test_arguments_are_named_too() -> None:
    with pytest.raises(ShippingError, match=r"arguments\[0\]\['lock'\]"):
        pack(({"lock": threading.Lock()},), name="arguments")


def test_the_registry_keeps_the_order_of_arrival() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    registry = LeafRegistry([first])
    assert [registry.index(second), registry.index(first), len(registry)] == [1, 0, 2]
    assert second in registry
    assert torch.ones(1) not in registry


def test_nothing_of_this_needs_numpy() -> None:
    code = """
import sys
sys.modules["numpy"] = None
import torch
from evenly.team.shipping import pack
pack(torch.ones(2))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_payload_is_an_ordinary_pickle_but_for_its_references() -> None:
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(pack(torch.ones(2)).payload)
