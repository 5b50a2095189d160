"""A wrapper with `CleanNames` goes by the names of the bare module: ``weight``, not ``module.weight``."""

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.nn.utils import parametrize

from evenly.wrapping import CleanNames


class Wrapper(CleanNames, nn.DataParallel):
    """The smallest wrapper that the mixin is made for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)


class Net(nn.Module):
    """A model with everything that state can be: nested, tied, buffers of both kinds, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.tied = self.fc
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.config = {"width": 4}
        self.extra = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.fc(x)) * self.scale

    def generate(self, length: int) -> str:
        return f"{length} of width {self.config['width']}"

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


class OwnModule(nn.Module):
    """A model that has a submodule called "module" of its own, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))


class OnlyModule(nn.Module):
    """A model that holds nothing but a submodule called "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


BUILDERS = [
    Net,
    OwnModule,
    OnlyModule,
    lambda: nn.BatchNorm1d(4),
    lambda: nn.Linear(2, 3),
    lambda: nn.LSTM(2, 3),
]
PLACES = {
    "alone": lambda m: m,
    "in a model": lambda m: nn.Sequential(nn.Linear(1, 1), m),
    "deep in a model": lambda m: nn.ModuleDict({"a": nn.Sequential(m, nn.BatchNorm1d(2)), "b": nn.Linear(1, 1)}),
    "in a compiled model": lambda m: m if "_orig_mod" in m._modules else torch.compile(m),
    "in an averaged model": torch.optim.swa_utils.AveragedModel,
    "in itself": lambda m: Wrapper(m) if isinstance(m, Wrapper) else m,
}
everywhere = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
any_model = pytest.mark.parametrize("build", BUILDERS)


def pair(build: Any, place: Any = PLACES["alone"]) -> tuple[nn.Module, nn.Module]:
    """The same model bare and wrapped, in the same place, with equal values in separate memory."""
    module = build()
    return put(place, copy.deepcopy(module)), put(place, Wrapper(module))


def put(place: Any, module: nn.Module) -> nn.Module:
    """Puts a module in its place, where what is around it has the same values every time."""
    torch.manual_seed(0)
    return place(module)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    assert first._metadata == second._metadata
    for name, value in first.items():
        assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]


def scramble(module: nn.Module) -> None:
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value.copy_(torch.rand(value.shape) * 100)
    for part in module.modules():
        if isinstance(part, Net):
            part.extra = 77


@everywhere
@any_model
def test_state_dicts_are_those_of_the_bare_model(build, place) -> None:
    bare, wrapped = pair(build, place)
    assert_same_state(bare, wrapped)
    kept = wrapped.state_dict(keep_vars=True)
    assert all(value.requires_grad for value in kept.values() if isinstance(value, nn.Parameter))
    assert list(wrapped.state_dict(prefix="x.")) == list(bare.state_dict(prefix="x."))
    destination: OrderedDict[str, Any] = OrderedDict(before=1)
    assert wrapped.state_dict(destination=destination) is destination
    assert list(destination) == ["before", *bare.state_dict()]


def test_state_dict_takes_positional_arguments() -> None:
    bare, wrapped = pair(Net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert list(wrapped.state_dict({}, "p.", True)) == list(bare.state_dict({}, "p.", True))


@everywhere
@any_model
def test_members_have_the_names_that_they_have_in_the_bare_model(build, place) -> None:
    bare, wrapped = pair(build, place)
    for remove_duplicate in (True, False):
        for kind in ("named_parameters", "named_buffers"):
            names = [
                [name for name, _ in getattr(model, kind)(prefix="p", remove_duplicate=remove_duplicate)]
                for model in (bare, wrapped)
            ]
            assert names[0] == names[1]
        seen = [
            [name for name, part in model.named_modules(remove_duplicate=remove_duplicate) if type(part) is not Wrapper]
            for model in (bare, wrapped)
        ]
        assert seen[0] == seen[1]
    assert len(list(bare.parameters())) == len(list(wrapped.parameters()))


@any_model
def test_members_are_found_by_their_names(build) -> None:
    _, wrapped = pair(build)
    module = wrapped.module
    for name, part in module.named_modules():
        assert wrapped.get_submodule(name) is (part if name else wrapped)
    for name, parameter in module.named_parameters():
        assert wrapped.get_parameter(name) is parameter
        assert wrapped.get_parameter("module." + name) is parameter
    for name, buffer in module.named_buffers():
        assert wrapped.get_buffer(name) is buffer
    for find in (wrapped.get_submodule, wrapped.get_parameter, wrapped.get_buffer):
        with pytest.raises(AttributeError):
            find("nothing.here")


def test_each_parameter_is_met_once_by_code_that_walks_through_modules() -> None:
    bare, wrapped = pair(Net)
    walks = [[p for m in model.modules() for p in m.parameters(recurse=False)] for model in (bare, wrapped)]
    assert len(walks[0]) == len(walks[1])
    walks = [[b for m in model.modules() for b in m.buffers(recurse=False)] for model in (bare, wrapped)]
    assert len(walks[0]) == len(walks[1])


def test_a_walk_starts_at_the_wrapper_and_goes_through_the_module() -> None:
    _, wrapped = pair(Net)
    assert next(wrapped.modules()) is wrapped
    assert list(wrapped.children()) == [wrapped.module]
    visited: list[nn.Module] = []
    wrapped.apply(visited.append)
    assert wrapped.module in visited
    assert not wrapped.eval().module.body[1].training
    assert wrapped.double().fc.weight.dtype is torch.float64


SOURCES = {
    "bare": lambda m: m,
    "wrapped": Wrapper,
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled data parallel": lambda m: torch.compile(nn.DataParallel(m)),
    "twice data parallel": lambda m: nn.DataParallel(nn.DataParallel(m)),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@everywhere
@any_model
def test_checkpoints_of_any_wrapping_load(build, place, source) -> None:
    inner = build()
    scramble(inner)
    saved = put(place, source(inner))
    _, wrapped = pair(build, place)
    result = wrapped.load_state_dict(saved.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_state(put(place, inner), wrapped)


def test_a_compiled_module_in_the_wrapper_takes_clean_checkpoints() -> None:
    source = Net()
    scramble(source)
    for saved in (source, nn.DataParallel(source), torch.compile(source)):
        wrapped = Wrapper(torch.compile(Net()))
        wrapped.load_state_dict(saved.state_dict())
        assert list(wrapped.state_dict()) == list(torch.compile(source).state_dict())
        assert torch.equal(wrapped.fc.weight, source.fc.weight)


def test_a_lazy_module_in_the_wrapper_takes_its_shape_from_the_checkpoint() -> None:
    wrapped = Wrapper(nn.Sequential(nn.LazyLinear(3)))
    wrapped.load_state_dict(nn.DataParallel(nn.Sequential(nn.Linear(2, 3))).state_dict())
    assert wrapped.get_parameter("0.weight").shape == (3, 2)


@everywhere
def test_loading_leaves_the_given_state_dict_alone(place) -> None:
    _, wrapped = pair(Net, place)
    state = place(nn.DataParallel(Net())).state_dict()
    keys, metadata = list(state), copy.deepcopy(state._metadata)
    wrapped.load_state_dict(state)
    assert list(state) == keys
    assert state._metadata == metadata


@everywhere
def test_the_wrapper_is_the_same_after_loading_as_before(place) -> None:
    _, wrapped = pair(Net, place)
    before = [(part, dict(part._modules)) for part in wrapped.modules()]
    wrapped.load_state_dict(wrapped.state_dict())
    with pytest.raises(RuntimeError):
        wrapped.load_state_dict({"nothing": torch.zeros(1)})
    assert all(type(part._modules) is dict and part._modules == children for part, children in before)


@everywhere
@any_model
def test_what_is_wrong_with_a_state_dict_is_said_as_for_the_bare_model(build, place) -> None:
    bare, wrapped = pair(build, place)
    name, value = next((k, v) for k, v in reversed(bare.state_dict().items()) if isinstance(v, torch.Tensor))
    for change in (
        lambda state: state.pop(name),
        lambda state: state.update({name + "x": value}),
        lambda state: state.update({name: torch.zeros(7, 7, 7)}),
    ):
        state = bare.state_dict()
        change(state)
        messages = []
        for model in (bare, wrapped):
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(state)
            messages.append(str(caught.value).partition(":\n")[2])
        assert messages[0] == messages[1]
        if "size mismatch" not in messages[0]:
            assert bare.load_state_dict(state, strict=False) == wrapped.load_state_dict(state, strict=False)


@everywhere
def test_an_unexpected_key_is_named_as_it_is_in_the_users_file(place) -> None:
    _, wrapped = pair(Net, place)
    saved = place(nn.DataParallel(Net()))
    state = saved.state_dict()
    given = next(iter(state)) + "_old"
    state[given] = torch.zeros(1)
    if place is PLACES["in itself"]:
        given = given.removeprefix("module.")  # cleaned by the outer of the two wrappers
    assert wrapped.load_state_dict(state, strict=False).unexpected_keys == [given]
    with pytest.raises(RuntimeError, match=given):
        wrapped.load_state_dict(state)


def test_two_keys_for_one_parameter_are_refused() -> None:
    state = {"weight": torch.zeros(1, 1), "module.weight": torch.ones(1, 1), "bias": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"'weight' and 'module\.weight' both become 'weight'"):
        Wrapper(nn.Linear(1, 1)).load_state_dict(state)


def test_what_is_no_state_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="type list"):
        Wrapper(nn.Linear(1, 1)).load_state_dict([])


class Versioned(nn.Module):
    """A module that reads old state dicts in their own way, as torch's own modules do."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen: list[Any] = []

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:
        self.seen.append((prefix, local_metadata.get("version")))
        if prefix + "gamma" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "gamma")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("place", [PLACES["alone"], PLACES["in a model"], PLACES["deep in a model"]])
def test_modules_see_the_versions_and_prefixes_that_they_see_bare(place) -> None:
    def seen(model: nn.Module) -> list[Any]:
        model.load_state_dict(state)
        return [part.seen for part in model.modules() if isinstance(part, Versioned)]

    bare, wrapped = pair(lambda: nn.Sequential(Versioned(), nn.Sequential(Versioned())), place)
    state = bare.state_dict()
    state._metadata = {name: {"version": 1} for name in state._metadata}
    assert seen(bare) == seen(wrapped)
    assert len(seen(bare)) == 2


def test_a_batch_norm_from_before_num_batches_tracked_loads() -> None:
    for place in (PLACES["alone"], PLACES["in a model"]):
        bare, wrapped = pair(lambda: nn.Sequential(nn.BatchNorm1d(2)), place)
        state = bare.state_dict()
        for name in [name for name in state if "num_batches" in name]:
            del state[name]
        for model in (bare, wrapped):  # of today's version, so the key is missing
            with pytest.raises(RuntimeError, match="num_batches_tracked"):
                model.load_state_dict(state)
        state._metadata = {name: {"version": 1} for name in state._metadata}
        wrapped.load_state_dict(state)


@pytest.mark.parametrize("place", [PLACES["alone"], PLACES["in a model"]])
def test_old_names_that_a_module_translates_load_from_a_wrapped_checkpoint(place) -> None:
    state = OrderedDict((k.replace("weight", "gamma"), v + 5) for k, v in Versioned().state_dict().items())
    prefix = "" if place is PLACES["alone"] else "1."
    full = {prefix + "module." + name: value for name, value in state.items()}
    if prefix:
        full.update({"0.weight": torch.zeros(1, 1), "0.bias": torch.zeros(1)})
    wrapped = place(Wrapper(Versioned()))
    wrapped.load_state_dict(full)
    assert wrapped.get_parameter(prefix + "weight").tolist() == [5, 5]


def test_assigning_takes_the_given_tensors() -> None:
    for place in (PLACES["alone"], PLACES["in a model"]):
        _, wrapped = pair(lambda: nn.Linear(2, 2), place)
        state = {name: value.double() for name, value in wrapped.state_dict().items()}
        wrapped.load_state_dict(state, assign=True)
        assert {p.dtype for p in wrapped.parameters()} == {torch.float64}


def test_hooks_of_module_and_wrapper_run_once_and_in_order() -> None:
    for place in (PLACES["alone"], PLACES["in a model"]):
        wrapper = Wrapper(nn.Sequential(nn.Linear(2, 2)))
        model = place(wrapper)
        calls: list[str] = []
        for name, module in (("wrapper", wrapper), ("module", wrapper.module), ("child", wrapper.module[0])):
            module.register_state_dict_pre_hook(lambda *_, n=name: calls.append("pre " + n))
            module.register_state_dict_post_hook(lambda *_, n=name: calls.append("post " + n))
            module.register_load_state_dict_pre_hook(lambda *_, n=name: calls.append("load pre " + n))
            module.register_load_state_dict_post_hook(lambda *_, n=name: calls.append("load post " + n))
        state = model.state_dict()
        around = ["wrapper", "module", "child"]
        assert calls == ["pre " + n for n in around] + ["post " + n for n in reversed(around)]
        calls.clear()
        model.load_state_dict(state)
        loading = [call for call in calls if call.startswith("load")]
        assert loading == ["load pre " + n for n in around] + ["load post " + n for n in reversed(around)]


def test_a_hook_may_forgive_missing_keys() -> None:
    for place in (PLACES["alone"], PLACES["in a model"]):
        wrapper = Wrapper(nn.Linear(2, 2))
        wrapper.module.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
        model = place(wrapper)
        state = {name: value for name, value in model.state_dict().items() if not name.endswith("bias")}
        model.load_state_dict(state)


def test_a_module_that_loads_in_its_own_way_does_so() -> None:
    class Own(nn.Linear):
        def load_state_dict(self, state_dict, strict=True) -> str:
            super().load_state_dict(state_dict, strict)
            return "own way"

    wrapped = Wrapper(Own(2, 2))
    assert wrapped.load_state_dict(nn.DataParallel(nn.Linear(2, 2)).state_dict()) == "own way"


def test_an_error_in_a_hook_leaves_the_wrapper_usable() -> None:
    wrapper = Wrapper(nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(wrapper)
    handle = wrapper.module[0].register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    for target in (wrapper, model):
        with pytest.raises(ZeroDivisionError):
            target.load_state_dict(target.state_dict())
        assert list(target.state_dict())
    handle.remove()
    model.load_state_dict(model.state_dict())
    assert list(wrapper.children()) == [wrapper.module]


def test_what_the_wrapper_lacks_comes_from_the_module() -> None:
    _, wrapped = pair(Net)
    assert wrapped.generate(3) == "3 of width 4"
    assert wrapped.config is wrapped.module.config
    assert wrapped.fc.weight is wrapped.module.fc.weight
    assert wrapped.steps is wrapped.module.steps
    assert {"generate", "config", "fc", "steps", "module", "device_ids"} <= set(dir(wrapped))
    assert dir(wrapped) == sorted(set(dir(wrapped)))


def test_what_nobody_has_is_said_to_be_missing_from_both() -> None:
    _, wrapped = pair(Net)
    with pytest.raises(AttributeError, match="'Wrapper' object has no attribute 'genrate', nor has the 'Net' object"):
        _ = wrapped.genrate
    assert not hasattr(wrapped, "genrate")
    assert not hasattr(Wrapper.__new__(Wrapper), "anything")


def test_special_methods_are_the_wrappers_own() -> None:
    class Copied(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            return Copied(2, 2)

        def __len__(self) -> int:
            return 3

    wrapped = Wrapper(Copied(2, 2))
    assert type(copy.deepcopy(wrapped)) is Wrapper
    assert not hasattr(wrapped, "__len__")


def test_layers_are_replaced_in_the_module() -> None:
    _, wrapped = pair(Net)
    head = nn.Linear(3, 4)
    wrapped.fc = head
    wrapped.scale = nn.Parameter(torch.zeros(()))
    wrapped.steps = torch.ones((), dtype=torch.int64)
    wrapped.new = nn.Linear(1, 1)
    wrapped.register_buffer("late", torch.zeros(1))
    wrapped.register_parameter("later", nn.Parameter(torch.zeros(1)))
    wrapped.add_module("latest", nn.Linear(1, 1))
    wrapped.set_submodule("body.0", nn.Linear(4, 4, bias=False))
    assert wrapped.module.fc is head
    assert wrapped(torch.randn(2, 3)).abs().sum() == 0
    assert {"late", "later", "latest.weight", "new.weight"} <= set(wrapped.module.state_dict())
    assert "body.0.bias" not in wrapped.state_dict()
    assert list(wrapped._modules) == ["module"]
    wrapped.tied = None
    assert wrapped.module.tied is None
    wrapped.tied = head
    assert wrapped.module.tied is head


def test_attributes_that_the_module_has_are_set_there_and_others_on_the_wrapper() -> None:
    _, wrapped = pair(Net)
    wrapped.note = "mine"
    assert not hasattr(wrapped.module, "note")
    wrapped.config = {}
    assert wrapped.module.config == {}
    assert "config" not in vars(wrapped)


def test_the_module_itself_is_replaced() -> None:
    _, wrapped = pair(Net)
    wrapped.module = nn.Linear(2, 2)
    assert list(wrapped.state_dict()) == ["weight", "bias"]
    wrapped.add_module("module", nn.Linear(2, 2, bias=False))
    assert list(wrapped.state_dict()) == ["weight"]


def test_copies_and_pickles_are_whole() -> None:
    bare, wrapped = pair(Net)
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        torch.load(buffer, weights_only=False),
        copy.copy(wrapped),
    ):
        assert type(other) is Wrapper
        assert_same_state(bare, other)
        other.load_state_dict(wrapped.state_dict())
        assert other.generate(1) == "1 of width 4"


def test_optimizers_by_name_name_the_bare_models_parameters() -> None:
    bare, wrapped = pair(Net)
    groups = [torch.optim.SGD(m.named_parameters()).state_dict()["param_groups"][0] for m in (bare, wrapped)]
    assert groups[0]["param_names"] == groups[1]["param_names"]


def test_parametrizations_are_named_as_in_the_bare_model() -> None:
    bare, wrapped = pair(Net)
    for model in (bare, wrapped):
        parametrize.register_parametrization(model.fc, "weight", nn.Identity())
    assert_same_state(bare, wrapped)
    wrapped.load_state_dict(nn.DataParallel(bare).state_dict())


def test_an_averaged_model_averages_and_loads() -> None:
    _, wrapped = pair(Net)
    averaged = torch.optim.swa_utils.AveragedModel(wrapped, use_buffers=True)
    averaged.update_parameters(wrapped)
    scramble(wrapped)
    averaged.update_parameters(wrapped)
    other = torch.optim.swa_utils.AveragedModel(Wrapper(Net()), use_buffers=True)
    other.load_state_dict(averaged.state_dict())
    assert_same_state(averaged, other)
    assert int(other.n_averaged) == 2


@pytest.mark.parametrize("place", [PLACES["alone"], PLACES["in a model"]])
def test_distributed_checkpoints_have_the_bare_models_names(place) -> None:
    bare, wrapped = pair(lambda: nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3)), place)
    states = [get_model_state_dict(model) for model in (bare, wrapped)]
    assert list(states[0]) == list(states[1])
    scramble(bare)
    set_model_state_dict(wrapped, get_model_state_dict(bare))
    assert_same_state(bare, wrapped)
    names = []
    for model in (bare, wrapped):
        optimizer = torch.optim.AdamW(model.parameters())
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        names.append(list(get_optimizer_state_dict(model, optimizer)["state"]))
    assert names[0] == names[1]
