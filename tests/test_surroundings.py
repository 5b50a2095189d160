"""What forward reads from outside of the module counts as it is at the call: globals, helpers, classes, closures."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest
import torch

import evenly
from evenly.replicated import Replicated
from evenly.surroundings import Surroundings
from parity import REPLICAS, compare, let_go, wrap

X = torch.arange(12.0).reshape(6, 2)
DEFINES = """
import torch
from torch import nn

BETA = 1.0
TABLE = {"beta": 1.0}
LEVELS = [1.0, [2.0]]
WEIGHT = torch.ones(2)
MODE = "plus"
class Options:
    pass
OPTIONS = Options()
OPTIONS.beta = 1.0
CALLS = 0

def helper(x):
    return x * 2

def scaled():
    beta = 1.0
    def scale(x):
        return x * beta
    def change(value):
        nonlocal beta
        beta = value
    return scale, change

scale, change = scaled()

class Base(nn.Module):
    shift = 0.0
    def extra(self, x):
        return x + self.shift

class Net(Base):
    factor = 1.0
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen = 0
    @property
    def bias(self):
        return OPTIONS.beta
    @torch.no_grad()
    def level(self):
        return LEVELS[1][0]
    def forward(self, x):
        global CALLS
        CALLS += 1
        self.seen += 1
        y = self.linear(x) * BETA * TABLE["beta"] * self.factor + self.level() * WEIGHT
        y = y + 1 if MODE == "plus" else y - 1
        return scale(helper(self.extra(y))) + self.bias

class Counting(nn.Module):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return x + CALLS
"""
CHANGES = {
    "a variable": "BETA = 2.0",
    "a string": "MODE = 'minus'",
    "a dict in place": "TABLE['beta'] = 3.0",
    "another dict": "TABLE = {'beta': 3.0}",
    "a nested list in place": "LEVELS[1][0] = 5.0",
    "attributes of an object": "OPTIONS.beta = 4.0",
    "another object": "OPTIONS = Options(); OPTIONS.beta = 6.0",
    "a tensor in place": "WEIGHT.mul_(3)",
    "another tensor": "WEIGHT = torch.full((2,), 7.0)",
    "a helper": "def helper(x): return x * 3 + BETA",
    "a class attribute": "Net.factor = 3.0",
    "a class attribute of a base": "Base.shift = 2.0",
    "a class attribute that hides that of a base": "Net.shift = 4.0",
    "a method": "Net.forward = lambda self, x: self.linear(x) - BETA",
    "a method of a base": "Base.extra = lambda self, x: x * 5",
    "a property": "Net.bias = property(lambda self: 9.0)",
    "a static method": "Net.extra = staticmethod(lambda x: x * 5)",
    "a closure": "change(4.0)",
}
# What comes next after a redefinition must be seen by the new definition, too.
AFTER = {"a helper": "BETA = 8.0", "a method": "BETA = 9.0", "another dict": "TABLE['beta'] = 5.0"}
_numbers = itertools.count()


@pytest.fixture(params=["by value", "by name"])
def code(request, tmp_path, monkeypatch):
    """A module with the definitions; other processes can import it, or cannot."""
    name = f"surroundings_{next(_numbers)}"
    if request.param == "by name":
        let_go()  # replicas look for modules where the driver did when they were started
        (tmp_path / f"{name}.py").write_text(DEFINES)
        monkeypatch.syspath_prepend(str(tmp_path))
        module = importlib.import_module(name)
    else:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(DEFINES, vars(module))
    yield module
    sys.modules.pop(name, None)
    if request.param == "by name":
        let_go()


def same(model, module):
    compare(model(X), module(X))


def test_changes_between_calls_reach_all_replicas(code):
    for replicas in REPLICAS:
        module = code.Net()
        model = wrap(module, replicas)
        same(model, module)
        for what, change in CHANGES.items():
            exec(change, vars(code))
            found, expected = model(X), module(X)
            compare(found, expected, f"{replicas} replicas, {what}: ")
            if what in AFTER:
                exec(AFTER[what], vars(code))
                compare(model(X), module(X), f"{replicas} replicas, after {what}: ")
        importlib.reload(code) if getattr(code, "__file__", None) else exec(DEFINES, vars(code))


def test_what_was_changed_before_the_first_call_is_known_to_replicas_that_import_it(code):
    module = code.Net()
    for what, change in CHANGES.items():
        if what not in ("a helper", "a method", "a method of a base", "a property", "a static method", "a closure"):
            exec(change, vars(code))
    same(wrap(module), module)


@pytest.mark.parametrize("what", CHANGES)
def test_processes_that_are_started_later_know_of_changes(code, what):
    module = code.Net()
    model = wrap(module)
    same(model, module)
    exec(CHANGES[what], vars(code))
    same(model, module)
    model._team.stop()
    same(model, module)


def test_a_deleted_attribute_shows_that_of_the_base(code):
    code.Net.shift = 3.0
    module = code.Net()
    model = wrap(module)
    same(model, module)
    del code.Net.shift
    same(model, module)


def test_a_number_that_changes_at_each_call_is_sent_alone(code, monkeypatch):
    ships = count(monkeypatch, Replicated, "_ship")
    collections = count(monkeypatch, Surroundings, "_collect")
    module = code.Net()
    model = wrap(module)
    same(model, module)
    for step in range(3):
        code.BETA, code.TABLE["beta"], code.Net.factor = step + 2.5, step + 0.5, step + 7.0
        same(model, module)
    assert len(ships) == 1
    assert len(collections) == 1


def test_what_does_not_change_is_not_sent(code, monkeypatch):
    ships = count(monkeypatch, Replicated, "_ship")
    patches = count(monkeypatch, Replicated, "_patch")
    model = wrap(code.Net())
    model(X)
    model(X)  # after a few rows were tried on a copy
    before = len(patches)
    for _ in range(3):  # forward itself counts its calls in a global variable
        model(X)
    assert len(ships) == 1
    assert len(patches) == before


def test_what_forward_sets_is_kept_in_each_replica(code):
    model = wrap(code.Counting())
    first = model(X).full_tensor()
    second = model(X).full_tensor()
    third = model(X).full_tensor()
    assert torch.equal(first, X + 1)
    assert torch.equal(second, X + 2)
    assert torch.equal(third, X + 3)
    code.CALLS = 10
    assert torch.equal(model(X).full_tensor(), X + 11)


def test_a_method_that_another_module_has_set_before_the_first_call(tmp_path, monkeypatch):
    let_go()
    (tmp_path / "patched.py").write_text(DEFINES)
    (tmp_path / "patches.py").write_text("SLOPE = 2.0\ndef forward(self, x):\n    return self.linear(x) * SLOPE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    patched, patches = importlib.import_module("patched"), importlib.import_module("patches")
    patched.Net.forward = patches.forward
    module = patched.Net()
    model = wrap(module)
    same(model, module)
    patches.SLOPE = 3.0
    same(model, module)
    let_go()


def test_what_cannot_be_sent_is_refused_by_name(tmp_path, monkeypatch):
    let_go()
    forward = "    def forward(self, x):\n        return x if LOCK is None else x * 2\n"
    (tmp_path / "held.py").write_text(f"from torch import nn\nLOCK = None\nclass Net(nn.Module):\n{forward}")
    monkeypatch.syspath_prepend(str(tmp_path))
    held = importlib.import_module("held")
    model = wrap(held.Net())
    compare(model(X), X)
    held.LOCK = threading.Lock()
    for _ in range(2):
        with pytest.raises(TypeError, match="the variable 'LOCK' of module 'held'"):
            model(X)
    held.LOCK = None
    compare(model(X), X)
    let_go()


def test_a_variable_of_an_imported_module_of_the_users(tmp_path, monkeypatch):
    let_go()
    (tmp_path / "cfgmod.py").write_text("beta = 1.0\nnested = {'a': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfgmod = importlib.import_module("cfgmod")
    module = Configured(cfgmod)
    model = wrap(module)
    for beta in (1.0, 2.0, 3.0):
        cfgmod.beta = beta
        cfgmod.nested["a"] += 1
        same(model, module)
    let_go()


def Configured(cfgmod):  # noqa: N802
    class Net(torch.nn.Module):
        def forward(self, x):
            return x * cfgmod.beta + cfgmod.nested["a"]

    return Net()


def test_a_closure_of_a_class_in_a_function():
    beta = 1.0

    class Net(torch.nn.Module):
        def forward(self, x):
            return x * beta

    for replicas in REPLICAS:
        model = wrap(Net(), replicas)
        for value in (2.0, 3.0):
            beta = value
            compare(model(X), X * beta)


def test_modules_of_torch_have_no_surroundings():
    found = Surroundings(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.BatchNorm1d(2)))
    assert not found._places
    assert found.changes() == []


def count(monkeypatch, cls, name):
    calls = []
    method = getattr(cls, name)

    def counted(self, *args, **kwargs):
        calls.append(self)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, counted)
    return calls


SCRIPT = """
import torch
from torch import nn
from evenly import DataParallel

BETA = 1.0
def helper(x): return x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 2)
    def forward(self, x): return helper(self.l(x)) * BETA + (LATE if not self.training else 0)

m = DataParallel(Net(), ["cpu"] * REPLICAS)
x = torch.randn(5, 3)
def check(): assert torch.allclose(m(x).full_tensor(), m.module(x)), (m(x), m.module(x))
check()
BETA = 2.0
check()
def helper(x): return x * 3
check()
BETA = 4.0
check()
LATE = 5.0
m.eval()
check()
LATE = 6.0
check()
print("same")
"""


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_script(replicas, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT.replace("REPLICAS", str(replicas))))
    sources = str(Path(evenly.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "same\n", done.stderr
