"""Kinds of arguments that public code passes to models, each replica with what belongs to its rows."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, OrderedDict, UserDict, deque
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import evenly
from modules import Calls, rows
from parity import REPLICAS, assert_same, compare, wrap


def check(function, *args, replicas=REPLICAS, **kwargs):
    """The function's outputs and gradients, bare and wrapped."""

    def loop(model):
        output = model(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves(output)
        losses = [leaf.square().mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if losses:
            sum(losses).backward()
        return output

    assert_same(lambda: Calls(function), loop, replicas=replicas)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9])
def test_all_kinds_of_arguments_together_on_batches_of_any_size(count):
    def function(layer, x, *rest, scale, mode="sum", options=None):
        names, hidden, bias = rest
        assert len(names) == len(x) == len(hidden)
        out = layer(x + hidden + bias) * scale
        return {"out": out if mode == "sum" else -out, "names": [name.upper() for name in names], "n": options["n"]}

    names = [f"row {number}" for number in range(count)]
    hidden, bias = rows(count, seed=1), rows(1, seed=2)
    check(function, rows(count), names, hidden, bias, scale=0.5, options={"n": 3, "on": True}, replicas=[2, 3, 4])


@pytest.mark.parametrize("shape", [(1, 3), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("how", ["positional", "keyword", "nested"])
def test_one_row_beside_eight_reaches_every_row(shape, how):
    one = torch.full(shape, 2.0)
    if how == "positional":
        check(lambda layer, x, one: layer(x) * one.sum(), rows(8), one)
    elif how == "keyword":
        check(lambda layer, x, *, one: layer(x) * one.sum(), rows(8), one=one)
    else:
        check(lambda layer, batch: layer(batch["x"]) * batch["one"][0].sum(), {"x": rows(8), "one": [one]})


def test_one_row_first_and_eight_after_is_refused_unless_said():
    function = lambda layer, one, x: layer(x) * one.sum()  # noqa: E731
    model = wrap(Calls(function))
    one = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"args\[1\] has size 8 .*1 rows"):
        model(one, rows(8))
    compare(model(evenly.replicate(one), rows(8)), model.module(one, rows(8)))


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("size", [4, 7, 16])
def test_a_mask_of_steps_beside_any_batch_is_an_error_that_says_what_to_do(size, replicas):
    def function(layer, x, mask):
        return layer(mask @ x)

    model, x, mask = wrap(Calls(function), replicas), rows(6, size, 3), torch.ones(size, size).tril()
    with pytest.raises(ValueError, match=rf"args\[1\] has size {size} .*6 rows.*evenly.replicate"):
        model(x, mask)
    compare(model(x, evenly.replicate(mask)), model.module(x, mask))
    model.in_dims = (0, None)
    compare(model(x, mask), model.module(x, mask))


def test_lengths_words_and_boxes_of_every_row():
    def function(layer, batch, targets, lengths):
        words = torch.tensor([sum(len(word) for word in text) for text in batch["txt"]])
        boxes = torch.stack([target["boxes"].sum() + target["size"][0] for target in targets])
        return {
            "out": layer(batch["img"]) * (words + boxes)[:, None] / torch.tensor(lengths)[:, None],
            "found": [{"box": target["boxes"] * 2, "name": target["name"]} for target in targets],
        }

    targets = [
        {"boxes": rows(count, 4, seed=count), "size": (count, 1), "name": f"{count}"} for count in (0, 4, 2, 3, 5)
    ]
    texts = [["a"] * (number + 1) for number in range(5)]
    check(function, {"img": rows(5), "txt": texts}, targets, [3, 1, 2, 5, 4])


class EasyDict(dict):
    """As the package of that name: items are attributes, too, and nested dicts become its own kind."""

    def __init__(self, items=(), **more):
        super().__init__()
        for key, value in {**dict(items), **more}.items():
            self[key] = value

    def __setitem__(self, key, value):
        value = EasyDict(value) if type(value) is dict else value
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    __setattr__ = __setitem__


class Sample(NamedTuple):
    image: torch.Tensor
    name: str = "x"


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    extra: dict = dataclasses.field(default_factory=dict)
    nothing: None = None


@dataclasses.dataclass
class Parent:
    image: torch.Tensor


@dataclasses.dataclass
class Child(Parent):
    more: tuple = ()


CONTAINERS = {
    "EasyDict": lambda x: EasyDict(image=x, deep={"twice": x * 2, "none": None, "empty": {}}),
    "UserDict": lambda x: UserDict(image=x, deep=UserDict(a=[])),
    "OrderedDict": lambda x: OrderedDict(image=x, deep=((), [], {})),
    "NamedTuple": lambda x: Sample(x),
    "frozen dataclass": lambda x: Frozen(x, {"also": x + 1}),
    "dataclass that inherits": lambda x: Child(x, (x, None)),
    "deque": lambda x: deque([x, None], maxlen=4),
    "deep": lambda x: [[[{"a": ({"b": [x]},)}]]],
    "read-only mapping": lambda x: MappingProxyType({"image": x}),
    "chain of mappings": lambda x: ChainMap({"image": x}, {"other": 1}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_arrive_as_what_they_are_with_their_rows(name):
    def find(value):
        while not isinstance(value, torch.Tensor):
            value = (
                value.image
                if hasattr(value, "image")
                else value["image"]
                if "image" in value
                else (next(iter(value.values())) if isinstance(value, dict) else value[0])
            )
        return value  # fmt: skip

    def function(layer, value):
        extra = value.deep.twice.sum(1, keepdim=True) if type(value).__name__ == "EasyDict" else 0
        return layer(find(value)) + extra, type(value).__name__

    check(function, CONTAINERS[name](rows(5)))


def test_a_container_comes_back_as_what_it_is():
    def function(layer, value):
        return value

    for name in ("EasyDict", "UserDict", "OrderedDict", "NamedTuple", "frozen dataclass", "deque", "deep"):
        check(function, CONTAINERS[name](rows(5)))


def test_empty_containers_none_and_no_arguments():
    check(lambda layer, x, a, b, c, d: layer(x) + len(a) + len(b) + len(c) + (d is None), rows(5), [], {}, (), None)
    check(lambda layer, *, x, nothing, deep: layer(x), x=rows(5), nothing=None, deep={"a": [None, ()], "b": {}})
    check(lambda layer, **kwargs: layer(kwargs["x"]), **{"x": rows(5), "a key": 1})
    check(lambda layer: layer.weight.exp())


def test_scalars_of_every_kind_beside_a_batch():
    def function(layer, x, a, b, c):
        return layer(x) * a + b.float() + c.item()

    check(function, rows(5), torch.tensor(2.0), torch.tensor(3), torch.tensor(True))
    leaf = torch.tensor(2.0, requires_grad=True)

    def loop(model):
        leaf.grad = None
        model(rows(5), leaf, torch.tensor(3), torch.tensor(1)).square().mean().backward()
        return leaf.grad

    assert_same(lambda: Calls(function), loop)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, packed, hidden=None):
        assert isinstance(packed, PackedSequence)
        output, last = self.rnn(packed, hidden)
        padded, lengths = pad_packed_sequence(output, batch_first=True, total_length=6)
        return padded, last, lengths


@pytest.mark.parametrize("sorted_", [True, False])
def test_packed_sequences_with_and_without_a_hidden_state(sorted_):
    lengths = [6, 4, 4, 2, 1] if sorted_ else [2, 6, 1, 4, 4]
    packed = pack_padded_sequence(rows(5, 6, 3), torch.tensor(lengths), batch_first=True, enforce_sorted=sorted_)

    def loop(model):
        seen = []
        for hidden in (None, rows(1, 5, 4)):
            output = model(packed) if hidden is None else model(packed, evenly_hidden(model, hidden))
            (output[0].square().mean() + output[1].sum()).backward()
            seen.append(output)
        return seen

    def evenly_hidden(model, hidden):
        # One layer: a state of size 1 along the first dimension, which would be given whole.
        if isinstance(model, evenly.DataParallel):
            model.in_dims = {1: 1}
        return hidden

    assert_same(Packed, loop)


def test_a_list_of_sequences_packed_by_the_collate_function():
    packed = pack_sequence([rows(count, seed=count) for count in (5, 3, 3, 1)])
    check(lambda layer, packed: PackedSequence(layer(packed.data), *packed[1:]), packed)


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_rows_of_a_coo_tensor(coalesced):
    indices = torch.tensor([[0, 0, 2, 4, 4], [0, 1, 2, 0, 0]])
    sparse = torch.sparse_coo_tensor(indices, rows(5, 1)[:, 0], (5, 3))
    sparse = sparse.coalesce() if coalesced else sparse
    check(lambda layer, x, y: torch.sparse.mm(x, layer.weight.t()) + layer(y), sparse, rows(5))


def test_the_state_of_an_lstm_goes_round():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2)

        def forward(self, x, state):
            return self.lstm(x, state)

    def loop(model):
        state = (torch.zeros(2, 5, 4), torch.zeros(2, 5, 4))
        outputs = []
        for seed in range(3):
            output, state = model(rows(6, 5, 3, seed=seed), state)
            state = tuple(part.detach() for part in state)
            outputs.append(output)
        sum(output.square().mean() for output in outputs).backward()
        return outputs, state

    assert_same(Recurrent, loop, dim=1)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_forward_puts_into_a_container_is_what_replica_0_puts_there(replicas):
    """Documented: arguments without rows are copied to the others; the driver's own object is replica 0's."""

    def function(layer, x, history, record):
        history.append(len(x))
        record["calls"] = record.get("calls", 0) + 1
        record.setdefault("sums", []).append(float(x.sum()))
        return layer(x) * len(history)

    model = wrap(Calls(function), replicas)
    history, record = deque([0], maxlen=3), {}
    x = rows(6)
    for calls in (1, 2, 3):
        compare(model(x, history, record), model.module.layer(x) * min(calls + 1, 3))
    own = 6 // replicas
    assert list(history) == [own] * 3
    assert record == {"calls": 3, "sums": [float(x[:own].sum())] * 3}
