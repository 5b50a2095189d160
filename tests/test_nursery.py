"""Where replicas come from: a process forked when the package is imported, or a fresh one; nobody else notices it."""

from __future__ import annotations

import os
import signal

import pytest

from evenly import DataParallel
from evenly.team import nursery
from evenly.team.errors import ReplicaDied
from orders import Obedient, X, expect_working, wait_for
from test_launch import TRAINS, expect_trained, run, script

HEAD, TAIL = TRAINS.split("import torch\n", 1)
"""What comes in between is done before the package is imported."""

LOOK = "from evenly.team import nursery\nat_import = nursery._nursery\n"
SAME = "\nassert at_import is not None and nursery._nursery is at_import\n"
FRESH = "\nassert at_import is None and nursery._nursery is not None\n"
IMPORTED = TAIL.replace("class Model", LOOK + "\nclass Model")


def expect_to_train(source, tmp_path, **environment):
    expect_trained(run(script(tmp_path, source), cwd=tmp_path, **environment))


# ---------------------------------------------------------------------- which of the two


def test_a_young_process_forks_it_when_the_package_is_imported(tmp_path):
    expect_to_train(f"import torch\n{IMPORTED}{SAME}", tmp_path)


OLD = {
    "a thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "threads of torch": "torch.set_num_threads(2); torch.ones(1 << 20).add(1)",
    "a module of its own": "import own",
    "a log": "import logging; logging.basicConfig(filename='log')",
    "a debugger": "import sys; sys.settrace(lambda *_: None)",
    "data": "data = bytearray(600 << 20); data[:] = b'x' * len(data)",
    "a handler of children's ends": "import signal; signal.signal(signal.SIGCHLD, lambda *_: None)",
    "a mode": "torch.set_default_device('cpu')",
    "the variable": "import os; os.environ['EVENLY_PREFORK'] = '0'",
}


@pytest.mark.parametrize("what", OLD)
def test_a_process_that_has_more_than_packages_gets_a_fresh_one_when_it_needs_it(what, tmp_path):
    script(tmp_path, "", "own.py")
    expect_to_train(f"import torch\n{OLD[what]}\n{IMPORTED}{FRESH}", tmp_path)


def test_a_module_that_is_loaded_again_is_so_in_the_replicas_too(tmp_path):
    own = "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x): return super().forward(x) * {}\n"
    script(tmp_path, own.format(2), "own.py")
    source = f"""
import importlib, sys
sys.dont_write_bytecode = True
import own
import torch
from evenly import DataParallel
open("own.py", "w").write({own.format(3)!r})
importlib.reload(own)
x = torch.randn(4, 3)
for count in (2, 3):
    model = DataParallel(own.Net(3, 2), ["cpu"] * count)
    torch.testing.assert_close(model(x).full_tensor(), model.module(x))
    print("trained", len(model._team.pids()))
"""
    expect_to_train(source, tmp_path)


# ---------------------------------------------------------------------- nobody notices it

BOTH = pytest.mark.parametrize("prefork", ["1", "0"])


@BOTH
def test_a_program_that_waits_for_its_children_does_not_meet_it(prefork, tmp_path):
    source = f"""
import os
import torch
if {prefork}: import evenly
def expect_no_child():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    raise AssertionError("there is a child")
expect_no_child()
{TAIL}
expect_no_child()
del model
expect_no_child()
"""
    expect_to_train(source, tmp_path, EVENLY_PREFORK=prefork)


@BOTH
def test_it_holds_nothing_open(prefork, tmp_path):
    source = f"""
import os
reading, writing = os.pipe()
file = open("file", "w")
file.write("once")
import torch
{TAIL}
os.close(writing)
assert os.read(reading, 1) == b""
file.close()
assert open("file").read() == "once"
"""
    expect_to_train(source, tmp_path, EVENLY_PREFORK=prefork)


def test_what_the_program_has_not_written_yet_is_written_once(tmp_path):
    source = f"print('tr', end='')\nimport torch\n{IMPORTED}{SAME}".replace('"trained"', '"ained"', 1)
    expect_to_train(source, tmp_path)


SEES = """
class Sees(nn.Linear):
    def forward(self, x):
        import os, signal, sys
        if evenly.team.presence.inside_replica():
            os.umask(umask := os.umask(0))
            handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGCHLD)
            seen = (os.environ.get("NEW"), "GONE" in os.environ, os.getcwd(), os.sched_getaffinity(0), umask, sys.argv,
                    sys.path, handlers == (signal.SIG_DFL, signal.SIG_DFL), "__file__" in vars(sys.modules["__main__"]))
            os.write(1, (repr(seen) + "\\n").encode())
        return super().forward(x)
"""


def test_replicas_take_over_what_is_so_when_they_are_started(tmp_path):
    source = f"""
import os, signal, sys
os.environ["GONE"] = "yes"
signal.signal(signal.SIGTERM, lambda *_: None)
import evenly, torch
from torch import nn
{LOOK}
{SEES}
def look():
    reading, writing = os.pipe()
    before = os.dup(1)
    os.dup2(writing, 1)
    model = evenly.DataParallel(Sees(3, 2), ["cpu", "cpu"], out_dims=0)
    os.dup2(before, 1)
    model(torch.randn(4, 3))
    seen = os.read(reading, 65536).decode().splitlines()[0]
    os.umask(umask := os.umask(0))
    wanted = (os.environ.get("NEW"), "GONE" in os.environ, os.getcwd(), os.sched_getaffinity(0), umask, sys.argv,
              sys.path, True, False)
    assert seen == repr(wanted), (seen, wanted)
look()
os.environ["NEW"] = "of today"
del os.environ["GONE"]
os.chdir("/")
os.umask(0o27)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
sys.argv.append("more")
sys.path.append("/somewhere")
look()
{SAME}
"""
    done = run(script(tmp_path, source), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_variables_that_libraries_read_when_they_are_loaded_take_a_fresh_one(tmp_path):
    change = "import os; os.environ['OMP_NUM_THREADS'] = '1'\nmodel ="
    source = f"import torch\n{IMPORTED}".replace("model =", change)
    expect_to_train(f"{source}\nassert at_import is not None and nursery._nursery is not at_import", tmp_path)


# ---------------------------------------------------------------------- when it fails


@BOTH
def test_ends_of_replicas_are_told_with_their_codes(prefork, tmp_path):
    source = """
import evenly, torch, os, signal
class Ends(torch.nn.Linear):
    def forward(self, x, how):
        if evenly.team.presence.inside_replica():
            os._exit(7) if how > 0 else os.kill(os.getpid(), -how)
        return super().forward(x)
model = evenly.DataParallel(Ends(3, 2), ["cpu", "cpu"])
for how, words in (7, "exited with code 7"), (-9, "was killed by SIGKILL"), (-11, "was killed by SIGSEGV"):
    try:
        model(torch.randn(4, 3), how)
    except evenly.ReplicaDied as error:
        assert words in str(error) and error.returncode == how, error
print("trained", len(model._team.pids()))
"""
    done = run(script(tmp_path, source), cwd=tmp_path, EVENLY_PREFORK=prefork)
    assert (done.returncode, done.stdout) == (0, "trained 0\n"), done.stderr


def test_when_it_is_killed_its_replicas_die_and_the_next_call_has_others():
    model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
    model(X)
    first = nursery._nursery
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: model._team._processes[0].death())
    with pytest.raises(ReplicaDied, match="was killed by SIGKILL while it was idle"):
        model(X)
    expect_working(model)
    assert nursery._nursery is not first


def test_when_it_was_killed_before_it_is_needed_another_takes_its_place():
    model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
    model(X)
    del model
    first = nursery._nursery
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.pid == 0)
    expect_working(DataParallel(Obedient(), device_ids=["cpu", "cpu"]))


def test_one_that_does_not_answer_is_given_up(monkeypatch):
    model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
    model(X)
    del model
    first = nursery._nursery
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setattr("evenly.team.team.START_SECONDS", 0.1)
    model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
    with pytest.raises(TimeoutError, match=r"replica 1 .* did not start within 0\.1 s"):
        model(X)
    monkeypatch.undo()
    expect_working(model)
    wait_for(lambda: first.pid == 0)


def test_a_forked_child_of_the_driver_has_no_part_in_it():
    model = DataParallel(Obedient(), device_ids=["cpu", "cpu"])
    model(X)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if nursery._nursery is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    expect_working(model)


def test_a_tensor_of_torchs_own_kind_of_sharding_works_beside_ours(tmp_path):
    source = f"""
import torch
{TAIL}
import sys
import torch.distributed as dist
assert "torch.distributed.tensor" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]).requires_grad_()
y = (x * 2).sum()
y.backward()
assert type(y) is DTensor and type(x.grad) is DTensor
assert y.full_tensor() == 30 and x.grad.full_tensor().eq(2).all()
dist.destroy_process_group()
"""
    expect_to_train(source, tmp_path)
