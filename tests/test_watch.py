"""What a Watch notices between two calls, and what it does not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

from evenly.team.shipping import LeafRegistry, pack, unpack
from evenly.watch import DELETED, Changes, Watch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.LSTM(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.scale = 2.0
        self.names = ["a", ["b"]]
        self.options = {"x": {"y": 1}}
        self.config = SimpleNamespace(rate=0.5, inner=SimpleNamespace(depth=3))
        self.head.config = self.config
        self.seen = deque([1])
        self.kinds = {"u"}
        self.table = torch.zeros(3)
        self.tables = [torch.zeros(3)]
        self.hook = partial(print, end="")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


def watched() -> tuple[Net, Watch]:
    net = Net()
    return net, Watch(net)


def no_change(net: Net) -> None: ...


def train_step(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.randn(2, 1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def buffer_values(net: Net) -> None:
    net.norm.running_mean.add_(1)


def buffer_of_the_same_kind(net: Net) -> None:
    net.norm.running_mean = torch.ones(4)


def weights_in_place(net: Net) -> None:
    net.conv.weight.data.clamp_(0, 1)


def load(net: Net) -> None:
    net.load_state_dict(Net().state_dict())


def equal_number(net: Net) -> None:
    net.scale = float("2.0")


@pytest.mark.parametrize(
    "change",
    [no_change, train_step, buffer_values, buffer_of_the_same_kind, weights_in_place, load, equal_number],
)
def test_no_change_is_seen(change: Callable[[Net], None]) -> None:
    net, watch = watched()
    change(net)
    assert not watch.changes()
    assert watch.changes() == Changes()


def replaced_module(net: Net) -> None:
    net.head[0] = nn.Linear(4, 4)


def added_module(net: Net) -> None:
    net.extra = nn.Linear(2, 2)


def added_to_an_empty_one(net: Net) -> None:
    net.head[1].inner = nn.Linear(2, 2)


def removed_module(net: Net) -> None:
    del net.head[1]


def swapped_modules(net: Net) -> None:
    first, second = net.head
    net.head._modules["0"], net.head._modules["1"] = second, first


def replaced_parameter(net: Net) -> None:
    net.conv.weight = nn.Parameter(net.conv.weight.detach().clone())


def removed_parameter(net: Net) -> None:
    net.conv.bias = None


def tied_parameter(net: Net) -> None:
    net.rnn.weight_hh_l0 = net.rnn.weight_ih_l0


def other_storage(net: Net) -> None:
    net.conv.weight.data = net.conv.weight.data.clone()


def half(net: Net) -> None:
    net.half()


def other_strides(net: Net) -> None:
    net.head[0].weight.data = net.head[0].weight.data.t()


def forward_hook(net: Net) -> None:
    net.head.register_forward_hook(lambda *_: None)


def backward_hook(net: Net) -> None:
    net.head[1].register_full_backward_hook(lambda *_: None)


def pre_hook(net: Net) -> None:
    net.register_forward_pre_hook(lambda *_: None, with_kwargs=True)


def new_buffer(net: Net) -> None:
    net.head[1].register_buffer("b", torch.ones(1))


def buffer_of_another_size(net: Net) -> None:
    net.norm.running_mean = torch.ones(5)


def buffer_gone(net: Net) -> None:
    net.norm.running_mean = None


def other_class(net: Net) -> None:
    net.head[1].__class__ = nn.Tanh


def parametrized(net: Net) -> None:
    parametrizations.spectral_norm(net.head[0])


@pytest.mark.parametrize(
    "change",
    [
        replaced_module,
        added_module,
        added_to_an_empty_one,
        removed_module,
        swapped_modules,
        replaced_parameter,
        removed_parameter,
        tied_parameter,
        other_storage,
        half,
        other_strides,
        forward_hook,
        backward_hook,
        pre_hook,
        new_buffer,
        buffer_of_another_size,
        buffer_gone,
        other_class,
        parametrized,
    ],
)
def test_structure(change: Callable[[Net], None]) -> None:
    net, watch = watched()
    change(net)
    assert watch.changes() == Changes(structure=True)
    watch.rebase_attributes()
    assert watch.changes().structure, "a forward in between makes no structure known to the replicas"
    watch.rebase()
    assert not watch.changes()


def test_a_setting_of_a_module_that_says_what_travels_is_structure() -> None:
    net, watch = watched()
    net.rnn.dropout = 0.5
    assert watch.changes().structure


def test_a_removed_hook() -> None:
    net = Net()
    handle = net.head.register_forward_hook(lambda *_: None)
    watch = Watch(net)
    handle.remove()
    net.head.register_forward_hook(lambda *_: None)
    assert watch.changes().structure


def test_a_removed_parametrization() -> None:
    net = Net()
    parametrizations.weight_norm(net.head[0])
    watch = Watch(net)
    assert not watch.changes()
    parametrize.remove_parametrizations(net.head[0], "weight")
    assert watch.changes().structure


def test_a_lazy_module_that_came_to_be() -> None:
    net = nn.Sequential(nn.LazyLinear(3))
    watch = Watch(net)
    assert not watch.changes()
    net(torch.ones(1, 2))
    assert watch.changes().structure


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: setattr(net, "scale", 3.0), "scale"),
        (lambda net: setattr(net, "scale", 2), "scale"),
        (lambda net: setattr(net, "new", None), "new"),
        (lambda net: net.names.append("c"), "names"),
        (lambda net: net.names[1].append("c"), "names"),
        (lambda net: net.names.__setitem__(0, "z"), "names"),
        (lambda net: net.options["x"].update(y=2), "options"),
        (lambda net: net.options.update(z=2), "options"),
        (lambda net: net.seen.append(2), "seen"),
        (lambda net: net.kinds.add("v"), "kinds"),
        (lambda net: net.table.add_(1), "table"),
        (lambda net: setattr(net, "table", torch.zeros(3)), "table"),
        (lambda net: net.tables[0].add_(1), "tables"),
        (lambda net: net.tables.__setitem__(0, torch.zeros(3)), "tables"),
        (lambda net: setattr(net, "hook", partial(print, end="x")), "hook"),
    ],
)
def test_an_attribute(change: Callable[[Net], None], name: str) -> None:
    net, watch = watched()
    change(net)
    assert watch.changes() == Changes(attributes=[(0, name, getattr(net, name))])
    assert watch.changes(), "looking must not move the baseline"
    watch.rebase_attributes()
    assert not watch.changes()


def test_an_attribute_that_is_gone() -> None:
    net, watch = watched()
    del net.scale
    assert watch.changes().attributes == [(0, "scale", DELETED)]


def test_a_config_that_several_modules_share() -> None:
    net, watch = watched()
    net.config.inner.depth = 4
    index = list(net.modules()).index(net.head)
    assert watch.changes().attributes == [(0, "config", net.config), (index, "config", net.config)]


def test_an_array_that_is_not_torchs() -> None:
    numpy = pytest.importorskip("numpy")
    net = Net()
    net.array = numpy.zeros(3)
    watch = Watch(net)
    assert not watch.changes()
    net.array[0] = 1
    assert [name for _, name, _ in watch.changes().attributes] == ["array"]


def test_what_contains_itself() -> None:
    net = Net()
    net.names.append(net.names)
    net.config.parent = net.config
    watch = Watch(net)
    assert not watch.changes()
    net.config.rate = 1
    assert watch.changes().attributes


def test_large_containers_count_by_their_length() -> None:
    net = Net()
    net.words = {str(i): i for i in range(5000)}
    watch = Watch(net)
    assert not watch.changes()
    net.words["new"] = 1
    assert [name for _, name, _ in watch.changes().attributes] == ["words"]


def test_what_forward_sets_is_no_change() -> None:
    net, watch = watched()
    net.calls = 1
    net.last = torch.ones(2)
    net.names.append("seen")
    watch.rebase_attributes()
    assert not watch.changes()
    net.calls = 5
    assert watch.changes().attributes == [(0, "calls", 5)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm_sets_its_weight_in_every_forward() -> None:
    net = nn.Sequential(weight_norm(nn.Linear(2, 2)))
    watch = Watch(net)
    net(torch.ones(1, 2)).sum().backward()
    watch.rebase_attributes()
    torch.optim.SGD(net.parameters(), 0.1).step()
    assert not watch.changes()


def test_training() -> None:
    net, watch = watched()
    net.head.eval()
    assert watch.changes() == Changes(training=[module.training for module in net.modules()])
    watch.rebase_attributes()
    assert not watch.changes()
    net.eval()
    assert watch.changes().training == [False] * len(list(net.modules()))


def test_requires_grad() -> None:
    net, watch = watched()
    net.conv.weight.requires_grad_(False)
    names = [name for name, _ in net.named_parameters()]
    assert watch.changes() == Changes(requires_grad=[(names.index("conv.weight"), False)])
    watch.rebase_attributes()
    assert not watch.changes()


def test_leaves_that_are_no_parameters() -> None:
    scale = torch.ones(1, requires_grad=True)
    net = nn.Linear(2, 2)
    net.act = lambda x: x * scale
    registry = LeafRegistry()
    pack(net, leaves=registry)
    watch = Watch(net, registry)
    assert not watch.changes()
    scale.requires_grad_(False)
    assert watch.changes().requires_grad == [(registry.index(scale), False)]


def test_changes_travel_and_are_applied() -> None:
    net, watch = watched()
    theirs = copy.deepcopy(net)
    modules, their_modules = list(net.modules()), list(theirs.modules())
    registry = LeafRegistry(net.parameters())
    net.scale = 5.0
    net.friends = [net.head]
    net.conv.weight.requires_grad_(False)
    net.norm.eval()
    del net.table
    parcel = pack(watch.changes(), leaves=registry, known_modules={id(m): i for i, m in enumerate(modules)})
    changes = unpack(parcel.payload, parcel.tensors, list(theirs.parameters()), their_modules)
    changes.apply(their_modules, list(theirs.parameters()))
    assert theirs.scale == 5.0
    assert theirs.friends[0] is theirs.head
    assert not theirs.conv.weight.requires_grad
    assert not theirs.norm.training
    assert theirs.training
    assert not hasattr(theirs, "table")


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: {"h": (t,)}, lambda t: SimpleNamespace(h=t)])
def test_what_forward_left_on_self_is_not_kept_alive(wrap: Callable[[Any], Any]) -> None:
    net, watch = watched()
    hidden = torch.ones(10)
    alive = weakref.ref(hidden)
    net.last = wrap(hidden)
    watch.rebase_attributes()
    net.last = None
    del hidden
    gc.collect()
    assert alive() is None


def test_ordered_dicts_and_subclasses_of_containers() -> None:
    class Options(dict[str, int]):
        pass

    net = Net()
    net.options = Options(a=1)
    net.options.extra = [1]
    net.order = OrderedDict(a=1, b=2)
    watch = Watch(net)
    assert not watch.changes()
    net.options.extra.append(2)
    net.order.move_to_end("a")
    assert [name for _, name, _ in watch.changes().attributes] == ["options", "order"]
