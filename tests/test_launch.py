"""Every way to run Python: replicas start, with the program's own classes, and say clearly when they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import evenly

SOURCES = str(Path(evenly.__file__).parents[1])

TRAINS = """
import torch
from torch import nn
from evenly import DataParallel

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)

model = DataParallel(Model(), device_ids=["cpu", "cpu"])
x = torch.randn(4, 3)
model(x).sum().backward()
assert torch.allclose(model.module.linear.bias.grad, torch.tensor([4.0, 4.0]))
print("trained", len(model._team.pids()))
three = DataParallel(Model(), device_ids=["cpu"] * 3)
three(x).sum().backward()
assert torch.allclose(three.module.linear.bias.grad, torch.tensor([4.0, 4.0]))
print("trained", len(three._team.pids()))
"""


def run(*command, cwd, stdin=None, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        input=stdin,
        env={**os.environ, "PYTHONPATH": SOURCES, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def expect_trained(done):
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 1\ntrained 2\n"
    assert done.stderr == ""


def script(folder, text, name="train.py"):
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


def test_a_script_without_a_guard(tmp_path):
    expect_trained(run(script(tmp_path, TRAINS), cwd="/"))


def test_a_command(tmp_path):
    expect_trained(run("-c", TRAINS, cwd=tmp_path))


def test_standard_input(tmp_path):
    expect_trained(run("-", cwd=tmp_path, stdin=TRAINS))


def test_a_module_run_with_m(tmp_path):
    script(tmp_path, TRAINS)
    expect_trained(run("-m", "train", cwd=tmp_path))


def test_a_class_in_a_function(tmp_path):
    expect_trained(run("-c", "def main():\n" + textwrap.indent(TRAINS, "    ") + "\nmain()", cwd=tmp_path))


NOTEBOOK = """
import linecache, sys, types

main = types.ModuleType("__main__")
sys.modules["__main__"] = main

def cell(number, source):
    name = f"<ipython-input-{number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), main.__dict__)
"""


def test_a_notebook(tmp_path):
    head, tail = TRAINS.split("model = ", 1)
    expect_trained(run("-c", f"{NOTEBOOK}\ncell(1, {head!r})\ncell(2, {'model = ' + tail!r})", cwd=tmp_path))


def test_an_error_in_a_notebook_shows_the_line_of_its_cell(tmp_path):
    fails = "if x.amax() > 9: raise ValueError('in a cell')\n        return"
    source = TRAINS.replace("return", fails, 1)
    failing = "x[-1] = 10.0\nmodel(x)\n"
    done = run("-c", f"{NOTEBOOK}\ncell(1, {source!r})\ncell(2, {failing!r})", cwd=tmp_path)
    assert 'File "<ipython-input-1>", line' in done.stderr
    assert "if x.amax() > 9: raise ValueError('in a cell')" in done.stderr
    assert "ValueError: in a cell" in done.stderr


@pytest.mark.parametrize("flags", [("-O",), ("-W", "error"), ("-X", "dev", "-W", "ignore"), ("-P", "-B", "-u")])
def test_flags_of_the_interpreter(flags, tmp_path):
    if "-P" in flags and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought it")
    expect_trained(run(*flags, "-c", TRAINS, cwd=tmp_path))


def test_files_beside_the_script_named_like_ours(tmp_path):
    for name in ("wire", "team", "replica", "memory", "protocol", "process", "evenly_", "batch", "values"):
        script(tmp_path, "raise RuntimeError('the wrong module')", f"{name}.py")
    expect_trained(run(script(tmp_path, TRAINS), cwd=tmp_path))


def test_files_in_the_current_folder_named_like_the_standard_librarys(tmp_path):
    for name in ("json", "socket", "select", "signal", "marshal", "pickle", "cloudpickle", "psutil", "numpy"):
        script(tmp_path, "raise RuntimeError('the wrong module')", f"{name}.py")
    elsewhere = tmp_path / "scripts"
    elsewhere.mkdir()
    expect_trained(run(script(elsewhere, TRAINS), cwd=tmp_path))


def test_modules_that_only_the_programs_own_path_leads_to(tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    head, tail = TRAINS.split("model = ", 1)
    script(folder, head, "mymodels.py")
    source = f"import sys; sys.path.append('lib')\nfrom mymodels import *\nmodel = {tail}"
    expect_trained(run(script(tmp_path, source), cwd=tmp_path))


def test_the_package_is_found_by_a_path_that_only_the_program_knows(tmp_path):
    source = f"import sys; sys.path.insert(0, {SOURCES!r})\n{TRAINS}"
    expect_trained(run("-c", source, cwd=tmp_path, PYTHONPATH=""))


def test_a_program_that_reads_its_arguments_where_its_modules_are_imported(tmp_path):
    script(tmp_path, "import sys; assert sys.argv[1:] == ['--lr', '1']", "options.py")
    source = TRAINS.replace("class Model(nn.Module):", "import options\nclass Model(nn.Module):\n    options = options")
    expect_trained(run(script(tmp_path, source), "--lr", "1", cwd=tmp_path))


def test_what_forward_prints_appears_and_nothing_else(tmp_path):
    source = TRAINS.replace("return self.linear(x)", "print('rows', len(x))\n        return self.linear(x)")
    source = source.replace("x = torch.randn(4, 3)", "x = torch.randn(5, 3)").replace("[4.0, 4.0]", "[5.0, 5.0]")
    # Unbuffered, Python writes a line in pieces, and those of two processes mix.
    done = run("-c", source, cwd=tmp_path, PYTHONUNBUFFERED="")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"rows 3", "rows 2", "rows 1", "trained 1", "trained 2"} == set(lines)
    assert done.stderr == ""


# ---------------------------------------------------------------------- when they cannot start


def expect_failure(source, cwd, *reasons):
    started = time.monotonic()
    done = run("-c", source, cwd=cwd, EVENLY_PREFORK="0")
    assert done.returncode == 1
    for reason in reasons:
        assert reason in done.stderr
    assert time.monotonic() - started < 30  # not the time that a slow start may take


def test_a_replica_that_cannot_import_what_it_needs_says_why(tmp_path):
    expect_failure(
        TRAINS.replace(
            "model = ", "import sys, evenly.engine, evenly.team.teams; sys.path[:] = ['/nowhere']\nmodel = "
        ),
        tmp_path,
        "replica 1 (cpu, pid ",
        "failed to start: it exited with code 1",
        "ModuleNotFoundError: No module named",
    )


def test_a_module_that_cannot_be_imported_there_is_named(tmp_path):
    once = "if 'replica' in open('/proc/self/comm').read(): raise OSError('only once')"
    script(tmp_path, once, "once.py")
    expect_failure(
        TRAINS.replace("class Model(nn.Module):", "import once\nclass Model(nn.Module):\n    once = once"),
        tmp_path,
        "OSError: only once",
        "once.py",
    )


@pytest.mark.parametrize(
    ("executable", "reason"),
    [
        ("", "sys.executable is empty"),
        ("/no/python", "cannot start a replica with the interpreter '/no/python' (sys.executable): No such file"),
        ("/bin/false", "failed to start: it exited with code 1"),
    ],
)
def test_an_interpreter_that_cannot_be_run(executable, reason, tmp_path):
    source = TRAINS.replace("model = ", f"import sys; sys.executable = {executable!r}\nmodel = ")
    expect_failure(source, tmp_path, reason)
