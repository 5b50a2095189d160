"""Kinds of state that public code keeps on a module: parameters met in forward, attributes, tensors, hooks."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from modules import Forward, bare, rows
from parity import assert_same, wrap


def step(model, *args, seed=0):
    output = model(*(args or (rows(5, seed=seed),)))
    output.exp().mean().backward()
    return output


# ---------------------------------------------------------------------- parameters in forward


def test_every_way_to_walk_through_parameters_in_forward():
    def forward(self, x):
        device, dtype = next(self.parameters()).device, next(self.parameters()).dtype
        penalty = sum(parameter.square().sum() for name, parameter in self.named_parameters() if "weight" in name)
        assert all(parameter.is_leaf and parameter.requires_grad for parameter in self.parameters())
        assert [name for name, _ in self.named_parameters()] == list(dict(self.named_parameters()))
        assert len(self.lists) == 2
        assert set(self.dicts.keys()) == {"a", "b"}
        for parameter in self.lists:
            x = x * parameter
        for parameter in self.dicts.values():
            x = x + parameter
        return self.layer(x.to(device, dtype)) * penalty + self.state_dict(keep_vars=True)["layer.bias"]

    def make():
        lists = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))])
        dicts = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.zeros(3))})
        return Forward(forward, lists=lists, dicts=dicts)

    assert_same(make, step)


def test_a_parameter_list_that_grows_between_steps():
    def forward(self, x):
        for parameter in self.lists:
            x = x * parameter
        return self.layer(x)

    def loop(model):
        outputs = [step(model)]
        bare(model).lists.append(nn.Parameter(torch.full((3,), 2.0)))
        outputs.append(step(model))
        bare(model).lists[0] = nn.Parameter(torch.full((3,), 3.0))
        outputs.append(step(model))
        return outputs

    assert_same(lambda: Forward(forward, lists=nn.ParameterList([nn.Parameter(torch.ones(3))])), loop)


@pytest.mark.parametrize("create_graph", [False, True], ids=["first order", "second order"])
def test_maml_adapts_to_each_task_in_forward(create_graph):
    """Each row is a task: its support set adapts the weights, its query set is evaluated with them."""

    def forward(self, support, support_y, query):
        outputs = []
        for x, y, q in zip(support, support_y, query, strict=True):
            weights = dict(self.layer.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(self.layer, weights, (x,)), y)
                grads = torch.autograd.grad(inner, list(weights.values()), create_graph=create_graph)
                weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            outputs.append(functional_call(self.layer, weights, (q,)))
        return torch.stack(outputs)

    generator = torch.Generator().manual_seed(3)
    batch = [torch.randn(5, 4, width, generator=generator) for width in (3, 2, 3)]

    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            output = model(*batch)
            output.square().mean().backward()
            optimizer.step()
            seen.append(output)
        return seen

    assert_same(lambda: Forward(forward), loop)


# ---------------------------------------------------------------------- attributes


def test_a_tensor_that_forward_leaves_for_the_next_forward():
    """A memory of its rows, as recurrent wrappers and momentum encoders keep it: each replica has its rows'."""

    def forward(self, x):
        hidden = self.layer(x).tanh()
        if self.memory is not None:
            hidden = hidden + 0.5 * self.memory
        self.memory = hidden.detach()
        return hidden

    def loop(model):
        outputs = [step(model, seed=seed) for seed in range(3)]
        bare(model).memory = None  # a new sequence
        return outputs, step(model)

    assert_same(lambda: Forward(forward, memory=None), loop)


def test_a_tensor_with_a_graph_left_on_self():
    def forward(self, x):
        self.features = self.layer(x)
        self.shapes.append(self.features.dim())
        return self.features.exp()

    def loop(model):
        outputs = [step(model, seed=seed) for seed in range(2)]
        return outputs, bare(model).shapes, bare(model).features.shape[1]

    assert_same(lambda: Forward(forward, features=None, shapes=deque(maxlen=3)), loop)


def test_counters_of_submodules_and_of_objects():
    def forward(self, x):
        self.layer.calls = getattr(self.layer, "calls", 0) + 1
        self.counter["calls"] += 1
        self.settings["nested"]["deep"].append(len(self.settings["nested"]["deep"]))
        return self.layer(x) * self.layer.calls * self.counter["calls"]

    def loop(model):
        outputs = [step(model) for _ in range(3)]
        module = bare(model)
        outputs.append(step(model.eval()))
        return outputs, module.layer.calls, dict(module.counter), module.settings

    assert_same(lambda: Forward(forward, counter=Counter(), settings={"nested": {"deep": []}}), loop)


def test_an_attribute_that_forward_and_the_user_change_in_turn():
    def forward(self, x):
        self.temperature *= 0.5
        return self.layer(x) * self.temperature

    def loop(model):
        outputs = [step(model), step(model)]
        bare(model).temperature = 8.0
        outputs += [step(model), step(model)]
        bare(model).temperature += 1
        return [*outputs, step(model)], bare(model).temperature

    assert_same(lambda: Forward(forward, temperature=1.0), loop)


def test_what_forward_left_on_self_is_freed_when_it_is_replaced():
    def forward(self, x):
        self.last = self.layer(x)
        return self.last * 2

    model = wrap(Forward(forward, last=None))
    step(model)
    left = weakref.ref(model.module.last)
    step(model)
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([[1.0, 0.0], [2.0, 3.0]]),
        lambda: torch.tensor([[1.0, 0.0], [2.0, 3.0]]).to_sparse(),
        lambda: torch.tensor([[1.0, 0.0], [2.0, 3.0]]).to_sparse_csr(),
        lambda: torch.tensor([[1.0, 2.0], [0.0, 3.0]]).t(),
        lambda: torch.ones(1, 1).expand(2, 2),
        lambda: torch.eye(2, dtype=torch.float64),
    ],
    ids=["dense", "coo", "csr", "transposed", "expanded", "float64"],
)
@pytest.mark.parametrize("place", ["attribute", "list", "dict", "submodule", "buffer"])
def test_plain_tensors_wherever_a_module_keeps_them(make, place):
    def forward(self, x):
        kept = {
            "attribute": lambda: self.kept,
            "list": lambda: self.kept[0],
            "dict": lambda: self.kept["a"],
            "submodule": lambda: self.layer.kept,
            "buffer": lambda: self.layer.kept,
        }[place]()
        return self.layer(x) @ (kept.to_dense() if kept.layout is not torch.strided else kept).float()

    def module():
        tensor = make()
        found = Forward(forward)
        if place == "buffer":
            found.layer.register_buffer("kept", tensor)
        elif place == "submodule":
            found.layer.kept = tensor
        else:
            found.kept = {"attribute": tensor, "list": [tensor], "dict": {"a": tensor}}[place]
        return found

    assert_same(module, lambda model: [step(model) for _ in range(2)])


# ---------------------------------------------------------------------- hooks


def test_hooks_of_every_kind_inside_of_the_module():
    def loop(model):
        module = bare(model)
        first, second = module[0], module[1]
        outputs = [step(model)]
        handles = [
            first.register_forward_pre_hook(lambda layer, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True),
            first.register_forward_hook(lambda layer, args, kwargs, output: output + 1, with_kwargs=True),
            second.register_forward_hook(lambda layer, args, output: output.tanh(), prepend=True),
            second.register_forward_hook(lambda layer, args, output: output * 3, always_call=True),
        ]
        outputs.append(step(model))
        while handles:
            handles.pop().remove()
            outputs.append(step(model))
        return outputs

    assert_same(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), loop)


def test_keyword_arguments_that_a_hook_changes():
    def forward(self, x, *, scale):
        return self.layer(x) * scale

    def loop(model):
        outputs = [model(rows(5), scale=2.0)]
        double = lambda module, args, kwargs: (args, {"scale": kwargs["scale"] * 2})  # noqa: E731
        handle = bare(model).register_forward_pre_hook(double, with_kwargs=True)
        outputs.append(model(rows(5), scale=2.0))
        handle.remove()
        outputs.append(model(rows(5), scale=2.0))
        outputs[1].sum().backward()
        return outputs

    assert_same(lambda: Forward(forward), loop)


@pytest.mark.parametrize("where", ["before wrapping", "after wrapping"])
def test_backward_hooks_inside_of_the_module_change_gradients(where):
    def hook(module):
        return [
            module[1].register_full_backward_hook(lambda layer, ins, outs: (ins[0] * 2,)),
            module[1].register_full_backward_pre_hook(lambda layer, outs: (outs[0] * 3,)),
        ]

    def make():
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        if where == "before wrapping":
            module.handles = hook(module)
        return module

    def loop(model):
        module = bare(model)
        handles = module.handles if where == "before wrapping" else hook(module)
        x = rows(5).requires_grad_()
        step(model, x)
        for handle in handles:
            handle.remove()
        step(model, x)
        return x.grad

    assert_same(make, loop)


def test_a_hook_that_an_intermediate_tensor_is_given_in_forward():
    def forward(self, x):
        hidden = self.layer(x)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return hidden.exp()

    assert_same(lambda: Forward(forward), step)


def test_a_hook_that_is_an_object_with_a_state():
    class Scale:
        def __init__(self):
            self.factor = 2.0

        def __call__(self, layer, args, output):
            return output * self.factor

    def loop(model):
        outputs = [step(model)]
        bare(model).scale = scale = Scale()
        handle = bare(model).layer.register_forward_hook(scale)
        outputs.append(step(model))
        handle.remove()
        outputs.append(step(model))
        return outputs

    assert_same(lambda: Forward(lambda self, x: self.layer(x)), loop)


def test_post_accumulate_hooks_of_parameters():
    def loop(model):
        seen = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        step(model)
        return sorted(float(gradient.sum()) for gradient in seen)

    assert_same(lambda: Forward(lambda self, x: self.layer(x)), loop)
