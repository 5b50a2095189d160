"""Whatever goes into a model bare goes into it wrapped, and every replica gets what belongs to its rows."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenly
from modules import Calls, rows
from parity import assert_same, compare, wrap

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    image: Any
    names: Any = None
    scale: float = 1.0


class EasyDict(dict):
    __getattr__ = dict.__getitem__


def check(function, *args, **kwargs):
    """The function's outputs and gradients, bare and wrapped."""

    def loop(model):
        output = model(*args, **kwargs)
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        loss = sum(tensor.square().mean() for tensor in tensors if tensor.requires_grad)
        if isinstance(loss, torch.Tensor):
            loss.backward()
        return output

    assert_same(lambda: Calls(function), loop)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_python_arguments_beside_batches_of_any_size(count, replicas):
    def function(layer, x, scale, *, offset, name, flag):
        return layer(x) * scale + offset if flag and name == "sum" else None

    def loop(model):
        output = model(rows(count), 2, offset=0.5, name="sum", flag=True)
        output.sum().backward()
        return output

    assert_same(lambda: Calls(function), loop, replicas=[replicas])


def test_an_empty_batch():
    check(lambda layer, x: layer(x), rows(0))


def test_a_tensor_of_one_row_beside_eight_is_given_whole():
    one = rows(1, seed=1)
    check(lambda layer, x, bias: layer(x + bias), rows(8), one)
    check(lambda layer, x, *, bias: layer(x + bias), rows(8), bias=one)


def test_a_tensor_of_another_size_is_refused_with_its_path_both_sizes_and_the_remedy():
    model = wrap(Calls(lambda layer, x, mask: layer(x) * mask.sum()))
    mask = torch.ones(5, 5)
    with pytest.raises(ValueError, match=r"args\[1\] has size 5 .*8 rows.*args\[0\].*replicate"):
        model(rows(8), mask)
    with pytest.raises(ValueError, match=r'kwargs\["mask"\] has size 5'):
        model(rows(8), mask=mask)
    compare(model(rows(8), evenly.replicate(mask)), model.module(rows(8), mask))


def test_a_mask_is_given_whole_by_in_dims():
    mask = torch.ones(5, 5).tril()

    def function(layer, x, mask):
        return layer(x.transpose(1, 2) @ mask @ torch.ones(5, 3)).transpose(1, 2)

    def loop(model):
        output = model(torch.ones(8, 5, 3), mask)
        output.sum().backward()
        return output

    assert_same(lambda: Calls(function), loop, in_dims=(0, None))


def test_strings_and_lengths_beside_tensors():
    def function(layer, batch):
        lengths = torch.tensor([len(text) for text in batch["txt"]])
        return {"out": layer(batch["img"]) * lengths[:, None], "txt": [text.upper() for text in batch["txt"]]}

    check(function, {"img": rows(8), "txt": ["a" * (i + 1) for i in range(8)]})


def test_targets_as_a_list_of_dicts_of_tensors():
    def function(layer, images, targets):
        boxes = torch.stack([target["boxes"].sum(0) for target in targets])
        return layer(images) * boxes.sum(1, keepdim=True)

    targets = [{"boxes": rows(count, 4, seed=count), "label": f"{count}"} for count in (1, 4, 2, 3, 5)]
    check(function, rows(5), targets)


def test_containers_keep_their_types():
    def function(layer, value):
        kind = type(value).__name__
        tensor = value.image if isinstance(value, Record) else value[0] if isinstance(value, tuple) else value["image"]
        return {"out": layer(tensor), "kind": kind}

    extra = {"name": "x", "missing": None, "empty": [], "nested": {"also": ()}}
    for value in (
        EasyDict(image=rows(5), **extra),
        UserDict(image=rows(5), **extra),
        OrderedDict(image=rows(5), **extra),
        defaultdict(list, image=rows(5), **extra),
        Record(rows(5), names=list("abcde")),
        Pair(rows(5), None),
        (rows(5), {"deep": [rows(5, seed=2)]}),
    ):
        check(function, value)


def test_attribute_access_on_a_dict_of_its_own_kind():
    check(lambda layer, batch: layer(batch.image), EasyDict(image=rows(5)))


def test_keyword_only_calls_and_calls_without_arguments():
    check(lambda layer, *, x: layer(x), x=rows(5))
    check(lambda layer: layer.weight.sum())


def test_scalars_and_none():
    check(lambda layer, x, scale, nothing: layer(x) * scale, rows(5), torch.tensor(2.0), None)


def test_sparse_rows():
    dense = rows(5) * (rows(5, seed=1) > 0)

    def function(layer, x):
        return torch.sparse.mm(x, layer.weight.t())

    check(function, dense.to_sparse())


def test_a_hidden_state_with_the_batch_in_its_second_dimension():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, num_layers=2, batch_first=True)

        def forward(self, x, hidden):
            return self.gru(x, hidden)

    def loop(model):
        hidden = torch.zeros(2, 5, 4)
        outputs = []
        for step in range(3):
            output, hidden = model(torch.ones(5, 6, 3) * step, hidden)
            hidden = hidden.detach()
            outputs.append(output)
        sum(output.square().mean() for output in outputs).backward()
        return outputs, hidden

    assert_same(Recurrent, loop, in_dims=(0, 1))


def test_a_hidden_state_without_in_dims_is_refused():
    model = wrap(Calls(lambda layer, x, h: layer(x)))
    with pytest.raises(ValueError, match=r"args\[1\] has size 2 .*5 rows.*in_dims"):
        model(rows(5), torch.zeros(2, 5, 4))


def test_the_batch_in_another_dimension():
    def loop(model):
        output = model(torch.arange(30.0).view(2, 5, 3))
        output.sum().backward()
        return output

    assert_same(lambda: Calls(lambda layer, x: layer(x)), loop, dim=1)


def test_a_deque_that_forward_appends_to_is_the_drivers_own():
    def function(layer, x, history):
        history.append(float(x.sum()))
        return layer(x)

    model = wrap(Calls(function))
    history = deque(maxlen=3)
    for _ in range(2):
        model(rows(5), history)
    assert list(history) == [pytest.approx(float(rows(5)[:3].sum()))] * 2


def test_an_input_that_requires_grad_gets_its_gradient():
    def loop(model):
        x = rows(7).requires_grad_()
        shared = rows(1, seed=1).requires_grad_()
        unused = rows(7, seed=2).requires_grad_()
        model(x, shared, unused).square().sum().backward()
        return x.grad, shared.grad, unused.grad

    assert_same(lambda: Calls(lambda layer, x, shared, unused: layer(x * shared)), loop)


def test_gradients_of_inputs_in_nested_containers():
    def loop(model):
        batch = {"deep": [rows(7).requires_grad_(), Pair(rows(7, seed=1).requires_grad_(), None)]}
        model(batch).square().mean().backward()
        return batch["deep"][0].grad, batch["deep"][1].left.grad

    assert_same(lambda: Calls(lambda layer, batch: layer(batch["deep"][0] * batch["deep"][1].left)), loop)


def test_gradients_of_tensors_in_per_sample_dicts():
    def loop(model):
        targets = [{"box": rows(2, seed=i).requires_grad_()} for i in range(5)]
        model(rows(5), targets).sum().backward()
        return [target["box"].grad for target in targets]

    def function(layer, x, targets):
        return layer(x + torch.stack([target["box"].mean(0) for target in targets]))

    assert_same(lambda: Calls(function), loop)


def test_one_tensor_given_twice():
    def loop(model):
        x = rows(5).requires_grad_()
        model(x, x, y=x).sum().backward()
        return x.grad

    assert_same(lambda: Calls(lambda layer, a, b, y: layer(a * b + y)), loop)


def test_an_argument_that_forward_changes_in_place():
    def function(layer, x, items):
        x += 1
        for item in items:
            item["box"].mul_(2)
        return layer(x)

    def loop(model):
        x = rows(5)
        items = [{"box": rows(2, seed=i)} for i in range(5)]
        output = model(x, items)
        return output, x, items

    assert_same(lambda: Calls(function), loop)


def test_an_argument_given_whole_that_replicas_change_differently_is_refused():
    def function(layer, x, total):
        total += x.sum()
        return layer(x)

    model = wrap(Calls(function))
    with pytest.raises(ValueError, match=r"args\[1\] .*changed in place .*replica 1"):
        model(rows(5), torch.zeros(()))


def test_a_parameter_of_the_model_as_an_argument():
    def loop(model):
        weight = next(model.parameters())
        (model(rows(5), weight).sum() + weight.sum()).backward()

    assert_same(lambda: Calls(lambda layer, x, weight: layer(x) + (x @ weight.t())), loop, in_dims=(0, None))


def test_a_tensor_on_which_somebody_else_waits_for_a_gradient():
    def loop(model):
        source = rows(5).requires_grad_()
        (model(source * 2).sum() + source.sum()).backward()
        return source.grad

    assert_same(lambda: Calls(lambda layer, x: layer(x)), loop)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float16, torch.complex64])
def test_dtypes(dtype):
    def function(layer, x):
        return layer(x.real.float() if x.is_complex() else x.float()), x

    check(function, torch.ones(5, 3).to(dtype))


def test_strides_and_views():
    base = torch.arange(60.0).view(3, 20)
    for x in (base.t(), base[:, ::2].t(), rows(1).expand(5, 3), torch.ones(5, 3, dtype=torch.complex64).conj().real):
        check(lambda layer, x: layer(x), x)


def test_samples_of_different_shapes():
    def function(layer, x, images):
        return layer(x) + torch.stack([image.mean() for image in images])[:, None]

    images = [torch.ones(2, i + 1) * i for i in range(5)]
    check_samples = wrap(Calls(function))
    found = check_samples(rows(5), evenly.samples(images))
    compare(found, check_samples.module(rows(5), images))


def test_uneven_split():
    def loop(model):
        output = model(rows(8))
        F.mse_loss(output, torch.ones(8, 2)).backward()
        return output

    assert_same(lambda: Calls(lambda layer, x: layer(x)), loop, replicas=[2], split=[3, 1])
    assert_same(lambda: Calls(lambda layer, x: layer(x)), loop, replicas=[3], split=[1, 5, 2])
