"""Whatever a model returns bare it returns wrapped: the structure, types and values of the whole batch."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import assert_same, compare, wrap

Both = namedtuple("Both", ["left", "right"])


@dataclasses.dataclass
class Report:
    logits: Any
    names: Any = None
    note: str = "fine"


@dataclasses.dataclass
class Output(OrderedDict):
    """As the outputs of transformers: a dataclass and a dict, without the fields that are None."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Box:
    """A class of the user's own with tensors in it."""

    def __init__(self, tensor, label):
        self.tensor = tensor
        self.label = label


class Net(nn.Module):
    """Returns what a function makes of its hidden layer."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.function = function

    def forward(self, x, *args, **kwargs):
        return self.function(self.layer(x), *args, **kwargs)


def rows(count, width=3, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def floats(output):
    if isinstance(output, Box):
        return [output.tensor]
    return [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(dict(output) if isinstance(output, UserDict) else output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def check(function, *args, count=5, **options):
    """Outputs and gradients of a model that returns what the function says."""

    def loop(model):
        output = model(rows(count), *args)
        loss = sum((place + 1) * tensor.square().mean() for place, tensor in enumerate(floats(output)))
        if isinstance(loss, torch.Tensor):
            loss.backward()
        return vars(output) if isinstance(output, Box) else output

    assert_same(lambda: Net(function), loop, **options)


STRUCTURES = {
    "a tensor": lambda h: h,
    "a tuple": lambda h: (h, h * 2),
    "a list": lambda h: [h, [h * 2, (h + 1,)]],
    "a dict": lambda h: {"a": h, 3: h * 2, "empty": {}, "none": None},
    "an ordered dict": lambda h: OrderedDict(b=h, a=h.exp()),
    "a named tuple": lambda h: Both(h, None),
    "a dataclass": lambda h: Report(h, ["x"] * len(h)),
    "a ModelOutput": lambda h: Output(loss=h.square().mean(), logits=h),
    "an object of a class of its own": lambda h: Box(h, "label"),
    "a sequence of sequences": lambda h: torch.stack([h, h * 2, h * 3]),
    "numbers and strings": lambda h: (h, 3, 2.5, "text", True, None),
    "a shape": lambda h: (h, h.shape[1:]),
    "lists of strings, one per row": lambda h: (h, [f"{len(row)}" for row in h], tuple("x" for _ in h)),
    "a deque with an item per row": lambda h: (h, deque("x" for _ in h)),
    "lists of lists of strings": lambda h: (h, [["a", "b"] for _ in h]),
    "a list of dicts of tensors, one per row": lambda h: [{"box": row, "n": 1} for row in h],
    "detections": lambda h: [{"box": row[: 1 + i % 2].repeat(2)} for i, row in enumerate(h)][:0] or h,
    "another batch dimension": lambda h: h.t(),
    "rows in the middle": lambda h: h.t().unsqueeze(-1).expand(4, -1, 2),
    "more entries than rows": lambda h: h.repeat_interleave(3, 0),
    "tokens and rows merged": lambda h: h.view(-1, 2),
    "a mean": lambda h: h.square().mean(),
    "a sum": lambda h: h.square().sum(),
    "several losses": lambda h: (h.mean(), h.square().sum(), h.exp().mean()),
    "a loss and logits": lambda h: (h.square().mean(), h),
    "a loss of one element": lambda h: h.square().mean().view(1),
    "losses in a dict": lambda h: {"a": h.mean(), "b": {"c": h.sum()}},
    "a mean of vectors": lambda h: h.mean(0),
    "integers": lambda h: (h.argmax(1), h > 0),
    "a count": lambda h: torch.tensor(len(h)),
    "a constant": lambda h: (h, torch.ones(2, 2), torch.tensor(3)),
    "no gradient": lambda h: h.detach(),
    "a detached one beside": lambda h: (h, h.detach(), h.argmax(1)),
    "the same twice": lambda h: (h, h),
    "a view and its base": lambda h: (h, h[:, :2]),
    "nothing": lambda h: None,
    "a string": lambda h: "done",
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_outputs_of_every_structure(kind):
    check(STRUCTURES[kind])


@pytest.mark.parametrize("kind", ["a tuple", "a loss and logits", "a list of dicts of tensors, one per row", "a count"])
def test_outputs_of_few_and_even_rows(kind):
    for count in (1, 2, 4, 6):
        check(STRUCTURES[kind], count=count)


def test_a_sum_of_counts_of_rows():
    check(lambda h: (h, (h > 0).sum()))


def test_parameters_and_functions_of_them_are_constants():
    class Regularised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return self.layer(x), self.layer.weight.square().sum(), self.layer.weight

    def loop(model):
        out, penalty, weight = model(rows(5))
        (out.square().mean() + penalty + weight.sum()).backward()
        return out, penalty, weight

    assert_same(Regularised, loop)


def test_an_input_that_is_returned():
    def loop(model):
        x = rows(5).requires_grad_()
        hidden, same = model(x)
        (hidden.sum() + same.square().sum()).backward()
        return same, x.grad

    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return self.layer(x), x

    assert_same(Passing, loop)


def test_one_of_two_outputs_is_dropped():
    def loop(model):
        first, _ = model(rows(5))
        first.sum().backward()

    assert_same(lambda: Net(lambda h: (h[:, :2], h[:, 2:])), loop)


def test_a_loss_in_forward_and_its_mean_outside():
    """The loop of `nn.DataParallel`, where losses came as vectors."""

    def loop(model):
        loss = model(rows(7)).mean()
        loss.backward()
        return loss

    assert_same(lambda: Net(lambda h: h.square().mean()), loop)


def test_a_loss_in_training_and_predictions_in_evaluation():
    class Switching(Net):
        def forward(self, x):
            hidden = self.layer(x)
            return {"loss": hidden.square().mean()} if self.training else hidden

    def loop(model):
        loss = model(rows(5))["loss"]
        loss.backward()
        model.eval()
        predictions = model(rows(5))
        model.train()
        return loss, predictions, model(rows(3))["loss"]

    assert_same(lambda: Switching(None), loop)


def test_a_sum_in_training_and_a_mean_in_evaluation():
    class Switching(Net):
        def forward(self, x):
            hidden = self.layer(x).square()
            return hidden.sum() if self.training else hidden.mean()

    def loop(model):
        loss = model(rows(5))
        loss.backward()
        return loss, model.eval()(rows(5))

    assert_same(lambda: Switching(None), loop)


def test_the_kind_of_a_loss_chosen_by_an_argument():
    def loop(model):
        losses = [model(rows(5), reduction) for reduction in ("mean", "sum", "none")]
        sum(loss.sum() for loss in losses).backward()
        return losses

    def function(h, reduction):
        return F.mse_loss(h, torch.zeros_like(h), reduction=reduction)

    assert_same(lambda: Net(function), loop)


def test_the_kind_of_a_loss_chosen_by_an_attribute():
    class Chosen(Net):
        reduction = "mean"

        def forward(self, x):
            hidden = self.layer(x)
            return F.mse_loss(hidden, torch.zeros_like(hidden), reduction=self.reduction)

    def loop(model):
        losses = [model(rows(5))]
        getattr(model, "module", model).reduction = "sum"
        losses.append(model(rows(5)))
        sum(losses).backward()
        return losses

    assert_same(lambda: Chosen(None), loop)


def test_a_loss_that_is_neither_mean_nor_sum_is_refused():
    model = wrap(Net(lambda h: h.square().mean().sqrt()))
    with pytest.raises(ValueError, match=r"output .*no mean and no sum.*scalar_outputs"):
        model(rows(5))
    model.module.function = lambda h: h.square().mean()
    compare(model(rows(5)), model.module(rows(5)))


def test_a_loss_of_zero_that_may_be_a_mean_or_a_sum_is_not_differentiated():
    model = wrap(Net(lambda h: (h - h.detach()).sum()))
    loss = model(rows(5))
    assert loss.item() == 0
    with pytest.raises(ValueError, match=r"output .*0 for all rows.*scalar_outputs"):
        loss.backward()
    check(lambda h: (h - h.detach()).sum(), scalar_outputs="sum")
    check(lambda h: (h - h.detach()).mean(), scalar_outputs="mean")


def test_statistics_over_the_rows_are_refused():
    model = wrap(Net(lambda h: (h - h.mean(0)) / h.std(0)))
    with pytest.raises(ValueError, match=r"output .*depend on the other rows"):
        model(rows(6))


def test_pairs_of_rows_are_refused():
    model = wrap(Net(lambda h: h @ h.t()))
    with pytest.raises(ValueError, match=r"output .*depends on all others"):
        model(rows(6))


def test_a_value_that_differs_without_rows_is_refused_with_its_path():
    model = wrap(Net(lambda h: {"n": f"{len(h)} rows"}))
    with pytest.raises(ValueError, match=r'output\["n"\] .*3 rows.*2 rows'):
        model(rows(5))


def test_none_on_some_replicas_is_refused():
    model = wrap(Net(lambda h: {"out": h if len(h) > 2 else None}))
    with pytest.raises(ValueError, match=r'output\["out"\] .*None'):
        model(rows(5))


def test_scalar_outputs_and_out_dims_say_what_the_probe_cannot():
    compare(wrap(Net(lambda h: h.sum().sqrt().nan_to_num()), scalar_outputs="stack")(rows(5)).shape, torch.Size([2]))
    even = wrap(Net(lambda h: h.t() if len(h) == 4 else 1 / 0), out_dims=1)
    compare(even(rows(8)).shape, torch.Size([4, 8]))


def test_a_model_that_cannot_be_probed_with_few_rows():
    def function(h):
        assert len(h) >= 4
        return h, h.mean()

    check(function, count=12, replicas=[2])


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones])
def test_equal_values_do_not_hide_that_even_shards_leave_open_what_is_rows(fill):
    def function(h):
        assert len(h) >= 4
        return fill(3, len(h))

    with pytest.raises(ValueError, match=r"output cannot be joined .* equally many rows.* out_dims="):
        wrap(Net(function))(rows(8))
    compare(wrap(Net(function), out_dims=1)(rows(8)), fill(3, 8))
    compare(wrap(Net(function))(rows(9)), fill(3, 9))


@pytest.mark.parametrize("item", ["a", None, 3])
@pytest.mark.parametrize("kind", [list, tuple])
def test_equal_items_do_not_hide_that_even_shards_leave_open_what_is_a_list_of_rows(kind, item):
    def function(h):
        assert len(h) >= 4
        return h.T, kind([item] * len(h))

    with pytest.raises(ValueError, match=r"output\[1\] cannot be joined .* equally many rows.* out_dims="):
        wrap(Net(function), out_dims=(1, ...))(rows(8))
    compare(wrap(Net(function), out_dims=(1, 0))(rows(8))[1], kind([item] * 8))
    compare(wrap(Net(function), out_dims=(1, None))(rows(8))[1], kind([item] * 4))
    compare(wrap(Net(function))(rows(9))[1], kind([item] * 9))


def test_a_model_with_random_outputs():
    model = wrap(Net(lambda h: h + torch.randn_like(h)))
    assert model(rows(5)).shape == (5, 4)


def test_outputs_that_require_grad_only_in_some_replicas():
    def function(h):
        return h if len(h) == 3 else h.detach()

    def loop(model):
        model(rows(5)).sum().backward()

    model = wrap(Net(function))
    loop(model)
    expected = rows(5)[:3].sum(0).expand(4, 3)
    compare(model.module.layer.weight.grad, expected)


def test_a_sparse_output_is_joined_or_refused_by_its_path():
    model = wrap(Net(lambda h: h.detach().to_sparse()))
    try:
        compare(model(rows(5)), model.module(rows(5)))
    except ValueError as error:
        assert "output" in str(error)  # noqa: PT017 - either is right


def test_more_dimensions_than_rows_may_grow_later():
    def loop(model):
        return [model(rows(count)) for count in (4, 5, 3, 8, 2, 1)]

    assert_same(lambda: Net(lambda h: (h, h.t(), [str(i) for i in range(len(h))][:0], h.mean())), loop)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_parameter_is_itself_where_no_probe_tells_that_it_has_no_rows(replicas):
    class Owning(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(8.0).view(4, 2))

        def forward(self, x):
            if len(x) not in (4, 4 * replicas):
                raise ValueError("made for these sizes")
            return x @ self.weight.T, self.weight

    def loop(model):
        out, weight = model(torch.arange(8.0 * replicas).view(-1, 2))
        assert weight is getattr(model, "module", model).weight
        (out.square().mean() + weight.sum()).backward()
        return out

    assert_same(Owning, loop, replicas=[replicas], out_dims=(0, ...))
