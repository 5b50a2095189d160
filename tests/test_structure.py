"""Nested values: taken apart and put together again, every container with its type."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from evenly.structure import flatten

Point = namedtuple("Point", ["x", "y"])


class NamedPoint(Point):
    """A namedtuple with attributes of its own."""


class BatchEncoding(UserDict):
    """As in transformers: attributes beside the items."""

    def __init__(self, data, encodings):
        super().__init__(data)
        self._encodings = encodings


class EasyDict(dict):
    """As in the package of that name: every item is an attribute too."""

    def __init__(self, items=()):
        super().__init__()
        for key, value in dict(items).items():
            setattr(self, key, value)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    __setitem__ = __setattr__


class OwnMapping(MutableMapping):
    """A mapping that keeps its items in an attribute."""

    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


@dataclass
class Batch:
    image: object
    label: object = None
    norm: object = field(default=None, init=False)


@dataclass(frozen=True)
class FrozenBatch:
    image: object

    def __post_init__(self):
        if not isinstance(self.image, (torch.Tensor, str)):
            raise TypeError(self.image)


@dataclass
class ModelOutput(OrderedDict):
    """The essence of the class in transformers: fields that are not None are items as well."""

    loss: object = None
    logits: object = None
    states: object = None

    def __post_init__(self):
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                OrderedDict.__setitem__(self, entry.name, getattr(self, entry.name))


class Registered:
    def __init__(self, part, name):
        self.part, self.name = part, name


pytree.register_pytree_node(
    Registered, lambda r: ([r.part], r.name), lambda children, name: Registered(*children, name)
)


def doubled(value):
    leaves, tree = flatten(value)
    return tree.rebuild([leaf * 2 for leaf in leaves])


@pytest.mark.parametrize(
    "value",
    [
        [1, [2, 3]],
        (1, (2,), ()),
        {"b": 1, "a": 2},
        OrderedDict(b=1, a=2),
        Point(1, 2),
        deque([1, 2], maxlen=5),
        torch.Size([2, 3]),
        EasyDict({"a": 1, "b": [2]}),
        MappingProxyType({"a": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_container_keeps_its_type_and_order(value):
    leaves, tree = flatten(value)
    again = tree.rebuild(leaves)
    assert type(again) is type(value)
    assert again == value
    assert list(again) == list(value)


def test_a_deque_keeps_its_maxlen_and_a_defaultdict_its_factory():
    assert doubled(deque([1], maxlen=3)).maxlen == 3
    assert doubled(defaultdict(list, a=1))["missing"] == []


def test_a_dict_subclass_that_mirrors_its_items_as_attributes_mirrors_the_new_ones():
    again = doubled(EasyDict({"a": 1}))
    assert (again["a"], again.a) == (2, 2)


def test_a_user_dict_keeps_its_other_attributes():
    again = doubled(BatchEncoding({"ids": 1}, encodings="kept"))
    assert isinstance(again, BatchEncoding)
    assert (again["ids"], again._encodings) == (2, "kept")


def test_a_mapping_of_the_users_own_is_not_changed_by_rebuilding_it():
    value = OwnMapping({"a": 1})
    assert doubled(value)["a"] == 2
    assert value["a"] == 1


def test_a_namedtuple_subclass_keeps_its_attributes():
    value = NamedPoint(1, 2)
    value.note = "kept"
    again = doubled(value)
    assert (again.x, again.note) == (2, "kept")


def test_a_dataclass_keeps_fields_without_init_and_attributes_that_are_no_fields():
    value = Batch(1, 2)
    value.norm, value.extra = 3, 4
    again = doubled(value)
    assert (again.image, again.label, again.norm, again.extra) == (2, 4, 6, 8)


def test_a_frozen_dataclass_is_rebuilt_without_its_constructor():
    leaves, tree = flatten(FrozenBatch("x"))
    assert tree.rebuild([leaves]).image == ["x"]


def test_a_model_output_has_items_and_attributes_and_keeps_its_none_fields():
    leaves, tree = flatten(ModelOutput(loss=1, states=(2, 3)))
    again = tree.rebuild([10, 20, 30])
    assert leaves == [1, 2, 3]
    assert (again.loss, again["loss"], again.logits, again.states) == (10, 10, None, (20, 30))
    assert list(again) == ["loss", "states"]


def test_registered_pytree_nodes_are_opened():
    again = doubled({"r": Registered(1, "name")})
    assert (again["r"].part, again["r"].name) == (2, "name")


def test_results_of_torch_functions_with_names_keep_them():
    leaves, tree = flatten(torch.max(torch.eye(2), 1))
    assert tree.rebuild(leaves[::-1]).indices is leaves[0]


def test_tensors_packed_sequences_modules_and_strings_are_leaves():
    value = [torch.ones(2), pack_sequence([torch.ones(2)]), torch.nn.Linear(1, 1), "text", None, {1}]
    leaves, _ = flatten(value)
    assert len(leaves) == len(value)
    assert all(leaf is item for leaf, item in zip(leaves, value, strict=True))


def test_paths_read_as_the_user_would_write_them():
    _, tree = flatten(((1, {"img": [2]}), {"mask": ModelOutput(loss=3), "p": Point(4, 5)}))
    assert tree.paths(("args", "kwargs")) == [
        "args[0]",
        'args[1]["img"][0]',
        'kwargs["mask"].loss',
        'kwargs["p"].x',
        'kwargs["p"].y',
    ]
    assert flatten(1)[1].paths("output") == ["output"]


def test_a_container_that_contains_itself_is_refused_with_its_path():
    inner: list = []
    inner.append({"again": inner})
    with pytest.raises(ValueError, match=r'args\[1\]\[0\]\["again"\] contains itself'):
        flatten(((1, inner), {}), root=("args", "kwargs"))


def test_the_same_container_twice_is_no_recursion():
    shared = [1]
    assert flatten([shared, shared])[0] == [1, 1]


def test_trees_are_equal_and_hash_alike_when_only_leaves_differ():
    first, second = (flatten({"a": [x], "b": None})[1] for x in (1, "x"))
    assert first == second
    assert hash(first) == hash(second)
    assert first != flatten({"a": (1,), "b": None})[1]
    assert first != flatten({"b": None, "a": [1]})[1]
    assert flatten(deque([1], 2))[1] != flatten(deque([1], 3))[1]
    assert flatten(((torch.ones(1),), {}))[1] == flatten(((None,), {}))[1]


def test_a_signature_travels_and_holds_no_values():
    _, tree = flatten(BatchEncoding({"ids": torch.ones(1)}, encodings=lambda: None))
    assert pickle.loads(pickle.dumps(tree.signature)) == tree.signature


def test_a_tree_finds_its_leaves_in_another_value():
    _, tree = flatten({"a": 1, "b": [2]})
    assert tree.flatten_up_to({"a": {"x": 1}, "b": [(3, 4)]}) == [{"x": 1}, (3, 4)]
    with pytest.raises(ValueError, match=r'output\["b"\] is a list of 2, expected a list of 1'):
        tree.flatten_up_to({"a": 1, "b": [2, 3]}, "output")


def test_a_remembered_tree_rebuilds_around_the_containers_of_another_value():
    remembered = flatten(BatchEncoding({"ids": 1}, encodings="old"))[1].without_values()
    leaves, tree = remembered.fit(BatchEncoding({"ids": 2}, encodings="new"))
    again = tree.rebuild(leaves)
    assert (again["ids"], again._encodings) == (2, "new")
    assert tree == remembered


nested = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.lists(inner, max_size=3).map(deque)
        | st.builds(Batch, inner, inner)
    ),
    max_leaves=15,
)


@settings(max_examples=60, deadline=None)
@given(nested)
def test_any_nested_value_makes_the_round_trip(value):
    leaves, tree = flatten(value)
    again = tree.rebuild(leaves)
    assert again == value
    assert flatten(again)[1] == tree
    assert len(tree.paths("value")) == tree.count == len(leaves)
