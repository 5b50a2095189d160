"""What the user says about arguments and outputs: `in_dims`, `out_dims`, `scalar_outputs`, `split` and the marks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evenly
from evenly import DataParallel
from evenly.outputs import override_rules
from parity import assert_same, compare, wrap
from test_outputs import probe


class Net(nn.Module):
    """Rows of `x`, beside a state whose rows are in dimension 1."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, state=None, *, mask=None):
        output = self.layer(x)
        if state is not None:
            output = output + state.sum(0)
        return output if mask is None else output @ mask


X, STATE, MASK = torch.ones(5, 3), torch.arange(20.0).view(2, 5, 2), torch.arange(4.0).view(2, 2)


# ---------------------------------------------------------------------- in_dims


@pytest.mark.parametrize(
    "in_dims", [(0, 1), (0, -2), [..., 1], {"state": 1}, {1: 1}, {"x": 0, "state": -2}, {"state": 1, "mask": None}]
)
def test_an_argument_is_cut_along_its_dimension_however_it_is_named(in_dims):
    assert_same(Net, lambda model: model(X, STATE), in_dims=in_dims)


@pytest.mark.parametrize("in_dims", [{"state": 1, "mask": None}, {1: 1, "mask": None}])
def test_names_hold_for_arguments_by_position_by_keyword_and_not_given(in_dims):
    def loop(model):
        whole = [model(X), model(X, STATE), model(X, state=STATE), model(X, mask=MASK), model(x=X, state=STATE)]
        return [*whole, model(X, STATE, mask=MASK)]

    assert_same(Net, loop, in_dims=in_dims)


def test_arguments_of_a_forward_that_takes_anything_must_be_given():
    class Anything(Net):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    assert_same(Anything, lambda model: model(X, state=STATE), in_dims={"state": 1})
    assert_same(Anything, lambda model: model(X, STATE), in_dims={1: 1})
    with pytest.raises(ValueError, match=r"in_dims names 'state', but this call gives no such argument"):
        wrap(Anything(), in_dims={"state": 1})(X)


@pytest.mark.parametrize(
    ("in_dims", "message"),
    [
        ((0,), r"in_dims has 1 entry, but the call has 2 positional arguments: give one for each, or a dict"),
        ((0, 1.0), r"in_dims gives 1.0 for args\[1\]: it takes an int \(the dimension of its rows\), None"),
        ((0, True), r"in_dims gives True for args\[1\]: it takes an int"),
        ((0, "sample"), r"in_dims gives 'sample' for args\[1\]: it takes .*\"samples\" \(one item per row\)"),
        ((0, (1, 1)), r"in_dims gives \(1, 1\) for args\[1\], but that is a Tensor: it takes an int"),
        ((0, 3), r"in_dims gives dimension 3 for args\[1\], which has 3 dimensions \(shape \[2, 5, 2\]\)"),
        ((0, "samples"), r"\"samples\" for args\[1\], but that is a Tensor: only a sequence"),
        ({"sate": 1}, r"in_dims names 'sate', .* forward\(x, state=None, \*, mask=None\) does not have it"),
        ({7: 1}, r"in_dims names 7, .* forward\(x, state=None, \*, mask=None\) does not have it"),
    ],
)
def test_in_dims_that_do_not_fit_the_call_are_refused_with_what_would(in_dims, message):
    with pytest.raises(ValueError, match=message):
        wrap(Net(), in_dims=in_dims)(X, STATE)


@pytest.mark.parametrize(
    ("in_dims", "message"),
    [
        ({"h": (1,)}, r'in_dims gives \(1,\) for args\[0\]\["h"\], 1 entry for a tuple of 2'),
        ({"h": (1, {"n": 0})}, r'args\[0\]\["h"\]\[1\], but that is a Tensor'),
        ({"c": 1}, r"in_dims names \['c'\] in args\[0\], which has only \['x', 'h'\]"),
    ],
)
def test_a_structure_that_does_not_fit_an_argument_is_refused_with_the_path(in_dims, message):
    with pytest.raises(ValueError, match=message):
        wrap(Net(), in_dims=(in_dims,))({"x": X, "h": (STATE, STATE)})


def test_a_size_that_in_dims_gave_says_so():
    with pytest.raises(ValueError, match=r"batch has 2 rows \(args\[0\] along dimension 0, shape \[2, 5, 2\]\)"):
        wrap(Net(), in_dims=(0, 0))(STATE, X)


# ---------------------------------------------------------------------- marks


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, given):
        return self.layer(x), given


def unmarked_nest(mark):
    return {"mask": mark(torch.ones(5, 5)), "more": [mark({"deep": mark(torch.ones(2))}), "text"]}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("outer", [evenly.replicate, lambda value: value])
def test_no_mark_reaches_the_module_wherever_it_is(outer, replicas):
    model = wrap(Returns(), replicas)
    compare(model(X, outer(unmarked_nest(evenly.replicate)))[1], unmarked_nest(lambda value: value))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_of_marks_around_each_other_the_outermost_counts(replicas):
    model = wrap(Returns(), replicas)
    names = list("abcde")
    compare(model(X, evenly.replicate(evenly.replicate(torch.ones(7))))[1], torch.ones(7))
    compare(model(X, evenly.samples([evenly.replicate(name) for name in names]))[1], names)
    items = [{"box": evenly.replicate(torch.ones(row, 4))} for row in range(5)]
    compare(model(X, evenly.samples(items))[1], [{"box": torch.ones(row, 4)} for row in range(5)])
    whole = DataParallel(Returns(), device_ids=["cpu"] * replicas, out_dims=(0, None))
    compare(whole(X, evenly.replicate(evenly.samples([1, 2])))[1], [1, 2])


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (torch.ones(5), "got a Tensor: a tensor is cut along its batch dimension without any mark"),
        ("abcde", "got a str: make a list of it"),
        ({"a": 1}, "got a dict: make a list of it"),
        ((letter for letter in "abcde"), "got a generator: make a list of it"),
        (5, "got an int"),
    ],
)
def test_samples_of_what_has_no_items_are_refused(items, message):
    with pytest.raises(TypeError, match=message):
        evenly.samples(items)


def test_samples_of_another_number_are_refused_with_both():
    model = wrap(Returns())
    with pytest.raises(ValueError, match=r"but the batch has 4 rows \(args\[1\], one for each of its 4 items\)"):
        model(X, evenly.samples(list("abcd")))
    with pytest.raises(ValueError, match=r"args\[1\] has 4 items, but the batch has 3 rows .*: give one item for each"):
        model(evenly.samples([1, 2, 3]), evenly.samples(list("abcd")))


# ---------------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_dims": (0,)}, r"out_dims gives \(0,\) for output, which is of type dict and has the parts"),
        ({"out_dims": {"y": 0}}, r"out_dims names \['y'\] in output, which has only \['x', 'stats'\]"),
        ({"out_dims": {"stats": {"m": (0, 0)}}}, r'out_dims gives \(0, 0\) for output\["stats"\]\["m"\], .* no parts'),
        (
            {"out_dims": {"x": True}},
            r'out_dims gives True for output\["x"\], which has shape \[4, 3\]: it takes the dim',
        ),
        ({"out_dims": {"x": "rows"}}, r"out_dims gives 'rows' .* or \.\.\. \(found out\)"),
        ({"scalar_outputs": {"stats": {"s": "sum"}}}, r"has shape \[3\]: it is about single numbers"),
    ],
)
def test_what_does_not_fit_the_output_is_refused_by_name_and_path(options, message):
    def forward(x):
        return {"x": x, "stats": {"m": x.mean(), "s": x.mean(0)}}

    rules, tree = probe(forward)
    with pytest.raises(ValueError, match=message):
        override_rules(tree, tree.flatten_up_to(forward(torch.ones(4, 3))), rules, **options)


def test_a_word_for_a_whole_structure_is_about_its_scalars():
    class Stats(Returns):
        def forward(self, x):
            output = self.layer(x)
            return {"x": output, "m": output.max(), "n": len(x)}

    torch.manual_seed(0)
    found = wrap(Stats(), scalar_outputs={"m": "stack"})(X)
    assert (found["x"].shape, found["m"].shape, found["n"]) == ((5, 2), (2,), 5)


# ---------------------------------------------------------------------- split


@pytest.mark.parametrize("split", ["ab", 5, [1, "2"], [1, None], [float("nan"), 1], [float("inf"), 1], [0, 0]])
def test_weights_that_are_no_weights_are_refused(split):
    with pytest.raises(ValueError, match=r"split .*(give a list of weights|must be positive numbers)"):
        DataParallel(Net(), device_ids=["cpu"] * 2, split=split)


@pytest.mark.filterwarnings("ignore:there is no accelerator")
def test_weights_wait_for_devices(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    compare(DataParallel(Net(), split=[2, 1])(X).shape, torch.Size([5, 2]))


def test_a_weighted_wrapper_inside_of_a_wrapper():
    assert_same(lambda: nn.Sequential(wrap(Net(), split=[3, 1]), nn.Linear(2, 1)), lambda model: model(X))


@pytest.mark.parametrize(("split", "rows"), [([3, 1], [4, 1]), ([1, 0], [5, 0]), ((0.5, 0.5), [3, 2])])
def test_weights_say_how_many_rows_each_replica_computes(split, rows):
    model = wrap(Net(), split=split)
    before = [replica.rows for replica in model.report()]
    compare(model(X), model.module(X))
    assert [replica.rows - old for replica, old in zip(model.report(), before, strict=True)] == rows


# ---------------------------------------------------------------------- whole_batch


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_the_whole_batch_adds_up_numbers_as_it_does_tensors(kind):
    class Loss(Returns):
        def forward(self, x):
            return self.layer(x).square().sum() / evenly.whole_batch(kind(len(x) + 1))

    module = Loss()
    for replicas in (2, 3):
        expected = module.layer(X).square().sum() / (len(X) + replicas)
        compare(wrap(module, replicas)(X), expected)
    assert evenly.whole_batch(3) == 3


@pytest.mark.parametrize("value", ["text", None, [1.0], True, torch.tensor([True])])
def test_what_cannot_be_added_up_is_refused_bare_and_over_replicas(value):
    class Adds(Returns):
        def forward(self, x):
            return self.layer(x), evenly.whole_batch(value)

    for model in (Adds(), wrap(Adds())):
        with pytest.raises(TypeError, match=r"whole_batch adds up numbers, got a .*like mask.sum\(\)"):
            model(X)
