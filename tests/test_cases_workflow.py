"""Failures, loaders and copies around a step, in ways that leave half-done things behind elsewhere."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from evenly.team.errors import ReplicaError
from parity import REPLICAS, assert_same, compare, wrap

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 0, 1, 2])


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))


def gradients(module):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def expect_right(model):
    """A whole step gives what the bare module gives."""
    model.zero_grad()
    out = model(X)
    F.cross_entropy(out, Y).backward()
    found = gradients(model)
    model.zero_grad()
    expected = model.module(X)
    F.cross_entropy(expected, Y).backward()
    compare([out, found], [expected, gradients(model)])
    model.zero_grad()


# ---------------------------------------------------------------------- exceptions


class LabelError(ValueError):
    """Takes three arguments, one of them by keyword, and says something of its own."""

    def __init__(self, row, label, *, allowed):
        super().__init__(row, label)
        self.row, self.label, self.allowed = row, label, allowed

    def __str__(self):
        return f"label {self.label} in row {self.row} is not among {self.allowed}"


class Strict(nn.Module):
    """Refuses rows that start with 99, in forward or in backward, unless they are few."""

    def __init__(self, error, phase, fails_from=1):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.error, self.phase, self.fails_from = error, phase, fails_from

    def forward(self, x):
        bad = bool((x[:, 0] == 99).any()) and len(x) >= self.fails_from
        if bad and self.phase == "forward":
            raise self.error()
        out = self.layer(x.clamp(max=1))
        if bad and out.requires_grad:
            out.register_hook(self._refuse)
        return out

    def _refuse(self, gradient):
        raise self.error()


def label_error():
    return LabelError(3, 9, allowed=(0, 1))


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("row", [0, 6], ids=["first shard", "last shard"])
def test_an_exception_of_several_arguments_in_one_shard(replicas, phase, row):
    model = wrap(Strict(label_error, phase), replicas)
    bad = X.clone()
    bad[row, 0] = 99
    for _ in range(3):
        with pytest.raises(LabelError, match=r"label 9 in row 3 is not among \(0, 1\)") as caught:
            model(bad).sum().backward()
        assert (caught.value.row, caught.value.label, caught.value.allowed) == (3, 9, (0, 1))
        if row:
            assert isinstance(caught.value.__cause__, ReplicaError)
            assert caught.value.__cause__.phase == phase
        model.zero_grad()
        model(X).sum().backward()
        compare(model.layer.bias.grad, torch.tensor([7.0, 7.0]))


def cpu_out_of_memory():
    return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: out of memory")


def gpu_out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize("error", [cpu_out_of_memory, gpu_out_of_memory, MemoryError])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_out_of_memory_in_one_shard_and_a_retry_with_half_of_the_batch(error, phase):
    def loop(model):
        x = X.clone()
        x[6, 0] = 99
        sizes, seen = [], []
        queue = [x]
        while queue:
            part = queue.pop(0)
            kept = [p.grad for p in model.parameters()]
            try:
                loss = model(part).sum()
                loss.backward()
                sizes.append(len(part))
            except (RuntimeError, MemoryError) as caught:
                seen.append((type(caught).__name__, str(caught)))
                for parameter, gradient in zip(model.parameters(), kept, strict=True):
                    parameter.grad = gradient
                half = len(part) // 2
                queue = [part[:half], part[half:], *queue]
        return sum(sizes), set(seen)

    assert_same(lambda: Strict(error, phase, fails_from=2), loop)


# ---------------------------------------------------------------------- data loaders


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3, generator=generator), "name": f"row {index}"}, index % 4


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.filterwarnings("ignore:This process")  # Python 3.12 warns of forks beside threads
def test_loaders_with_workers_from_before_and_after_wrapping(start, persistent):
    if start != "fork" and persistent:
        pytest.skip("processes start slowly, and differ only in how")

    def loader():
        return DataLoader(
            Squares(), batch_size=5, num_workers=2, persistent_workers=persistent, multiprocessing_context=start
        )

    def train(model, *loaders):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for each in loaders:
            for batch, y in each:
                optimizer.zero_grad()
                F.cross_entropy(model(batch["x"]), y).backward()
                optimizer.step()

    before = loader()
    early = iter(before)
    first = next(early)
    model = wrap(make(), 2)
    train(model, [first], early, loader(), before)
    bare = make()
    once = list(DataLoader(Squares(), batch_size=5))
    train(bare, once, once, once)
    compare(dict(model.state_dict()), dict(bare.state_dict()))
    del early


class Evaluating(Dataset):
    """Runs the bare module in the workers, as pipelines with a frozen encoder do."""

    def __init__(self, module):
        self.module = module

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with torch.no_grad():
            return self.module(X[index])


@pytest.mark.filterwarnings("ignore:This process")
def test_workers_that_run_the_bare_module_while_outputs_are_alive():
    model = wrap(make(), 2)
    out = model(X)
    found = torch.cat(list(DataLoader(Evaluating(model.module), batch_size=4, num_workers=2)))
    compare(found, model.module(X[:6]).detach())
    F.cross_entropy(out, Y).backward()
    expect_right(model)


# ---------------------------------------------------------------------- the wrapper


def test_wrapped_models_in_modules_chains_and_wrappers():
    def loop(model):
        bare = getattr(model, "module", model)
        head = nn.Linear(4, 2)
        nn.init.ones_(head.weight)
        nn.init.zeros_(head.bias)
        if bare is not model:
            count = len(model.device_ids)
            model, head = wrap(wrap(bare, count), count), wrap(nn.Sequential(wrap(head, count)), count)
        whole = nn.ModuleDict({"body": model, "head": head})
        optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = whole["body"](X)
            out = whole["head"](hidden) + whole["head"](hidden.detach())
            (out.square().mean() + hidden.mean()).backward()
            optimizer.step()
        return out, [parameter.detach().clone() for parameter in whole.parameters()]

    assert_same(make, loop)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_training_goes_on_in_the_bare_module_and_back_with_the_optimizers_state(replicas):
    def run(switching):
        module = make()
        model = wrap(module, replicas) if switching else module
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(6):
            if switching and step == 2:  # saved by one, loaded by the other
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model = make()
                model.load_state_dict(saved["model"])
                optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
                optimizer.load_state_dict(saved["optimizer"])
            if switching and step == 4:
                model = wrap(copy.deepcopy(model), replicas)
                states = optimizer.state_dict()
                optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
                optimizer.load_state_dict(states)
            optimizer.zero_grad()
            F.cross_entropy(model(X + step), Y).backward()
            optimizer.step()
        return dict(model.state_dict())

    compare(run(switching=True), run(switching=False))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_run_resumed_from_its_random_state_is_the_same_bit_for_bit(replicas):
    def steps(model, count):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    module = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    model = wrap(module, replicas)
    steps(model, 2)
    saved, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    expected = steps(model, 3)
    again = wrap(copy.deepcopy(module), replicas)
    again.load_state_dict(saved)
    torch.set_rng_state(state)
    assert steps(again, 3) == expected
