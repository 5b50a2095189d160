"""Exceptions of a replica, as the driver raises them."""

from __future__ import annotations

import linecache
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenly.team.errors import ReplicaDied, ReplicaError, death_message, describe, restore
from evenly.team.shipping import pack, unpack


def raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


def across(exc: BaseException) -> BaseException:
    return restore(describe(exc), replica=1, device="cpu", phase="forward")


def story_of(exc: BaseException) -> str:
    assert isinstance(exc.__cause__, ReplicaError)
    return str(exc.__cause__)


class Shape(ValueError):
    """Wants two arguments, keeps one."""

    def __init__(self, want: int, got: int) -> None:
        super().__init__(f"want {want}, got {got}")
        self.want, self.got = want, got


class KeywordOnly(RuntimeError):
    def __init__(self, *, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Slotted(Exception):
    __slots__ = ("where",)


class OwnReduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        self.sum = a + b

    def __reduce__(self) -> Any:
        return OwnReduce, (self.sum, 0)


class BadFile(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "bad", path)


def bad_file() -> None:
    raise BadFile("/x")


class Unprintable(Exception):
    def __str__(self) -> str:
        return self.missing


def test_type_arguments_and_attributes_are_kept() -> None:
    exc = across(Shape(3, 4))
    assert type(exc) is Shape
    assert str(exc) == "want 3, got 4"
    assert (exc.want, exc.got) == (3, 4)


def test_keyword_only_arguments() -> None:
    exc = across(KeywordOnly(code=7))
    assert type(exc) is KeywordOnly
    assert str(exc) == "code 7"


def test_slots_are_kept() -> None:
    sent = Slotted("x")
    sent.where = "here"
    assert across(sent).where == "here"


def test_a_class_that_says_how_to_rebuild_it_is_heard() -> None:
    exc = across(OwnReduce(1, 2))
    assert type(exc) is OwnReduce
    assert exc.sum == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: open("/does/not/exist"),  # noqa: PTH123, SIM115
        lambda: {}["key"],
        lambda: "ä".encode("ascii"),
        lambda: torch.zeros(2) @ torch.zeros(3),
        lambda: next(iter(())),
        lambda: int("x"),
        lambda: sys.exit(3),
        lambda: __import__("not_a_module"),
        lambda: exec("1 +"),
        bad_file,
    ],
)
def test_builtin_exceptions_are_the_same_in_every_field(make: Callable[[], Any]) -> None:
    sent = raised(make)
    exc = across(sent)
    assert type(exc) is type(sent)
    assert str(exc) == str(sent)
    for field in ("args", "errno", "filename", "start", "reason", "value", "code", "name", "lineno"):
        assert getattr(exc, field, None) == getattr(sent, field, None)


def test_out_of_memory_stays_out_of_memory() -> None:
    assert type(across(torch.OutOfMemoryError("no room"))) is torch.OutOfMemoryError


def test_the_cause_says_where_it_happened_with_source_lines() -> None:
    def forward() -> None:
        raise ValueError("bad value")  # this line

    exc = across(raised(forward))
    story = story_of(exc)
    assert story.startswith("replica 1 (cpu) failed in forward:\n\n  File ")
    assert f'File "{__file__}", line ' in story
    assert 'raise ValueError("bad value")  # this line' in story
    assert story.endswith("ValueError: bad value\n")
    cause: Any = exc.__cause__
    assert (cause.replica, cause.device, cause.phase) == (1, "cpu", "forward")


def test_functions_that_were_shipped_keep_their_lines() -> None:
    def forward() -> None:
        raise ValueError  # found through the shipped code

    shipped = unpack(pack(forward).payload)
    assert "# found through the shipped code" in story_of(across(raised(shipped)))


def test_a_notebook_cells_lines_are_looked_up_in_the_driver() -> None:
    source = "def forward():\n    return 1 / 0  # in a cell\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, "<cell 5>", "exec"), namespace)
    data = describe(raised(namespace["forward"]))
    linecache.cache["<cell 5>"] = (len(source), None, source.splitlines(keepends=True), "<cell 5>")
    try:
        story = str(restore(data, replica=2, device="cuda:2", phase="forward").__cause__)
    finally:
        del linecache.cache["<cell 5>"]
    assert "return 1 / 0  # in a cell" in story
    assert 'File "<cell 5>", line 2, in forward' in story


def test_no_line_is_invented_where_the_source_is_unknown() -> None:
    namespace: dict[str, Any] = {}
    exec(compile("def forward():\n    return 1 / 0\n", "<nowhere>", "exec"), namespace)
    lines = story_of(across(raised(namespace["forward"]))).splitlines()
    assert lines[-2:] == ['  File "<nowhere>", line 2, in forward', "ZeroDivisionError: division by zero"]


def test_evenlys_own_frames_at_the_top_are_dropped() -> None:
    payload = pack(0).payload
    story = story_of(across(raised(lambda: unpack(payload[:-2]))))
    assert "shipping.py" in story  # below the user's frame they stay

    def user() -> None:
        raise KeyError(1)

    from evenly.team.shipping import _Pickler

    machine: Any = lambda: _Pickler.persistent_id(Probe(user), 3)  # noqa: E731
    error = raised(machine)
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # from Evenly's frame on
    story = story_of(across(error))
    assert "shipping.py" not in story
    assert "in user" in story


class Probe:
    """Makes a function of Evenly call `function`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    @property
    def _kinds(self) -> Any:
        return self.function()


def test_causes_and_contexts_are_told_in_order() -> None:
    def fails() -> None:
        try:
            try:
                int("x")
            except ValueError as error:
                raise KeyError("k") from error
        except KeyError:
            raise RuntimeError("last")  # noqa: B904

    story = story_of(across(raised(fails)))
    assert story.index("ValueError: invalid") < story.index("direct cause") < story.index("KeyError: 'k'")
    assert story.index("KeyError: 'k'") < story.index("During handling") < story.index("RuntimeError: last")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are new in Python 3.11")
def test_notes_are_kept() -> None:
    sent = ValueError("x")
    sent.add_note("look here")
    exc = across(sent)
    assert exc.__notes__ == ["look here"]
    assert "look here" in story_of(exc)


def test_what_cannot_travel_is_replaced_and_named() -> None:
    sent = ValueError("x", threading.Lock())
    sent.lock, sent.fine = threading.Lock(), 3
    exc = across(sent)
    assert type(exc) is ValueError
    assert exc.args[0] == "x"
    assert exc.args[1].startswith("<unlocked _thread.lock")
    assert exc.fine == 3
    assert "lock = <unlocked" in exc.__notes__[0]


def test_tensors_come_along_unless_they_are_large() -> None:
    sent = ValueError(torch.arange(3), torch.zeros(1 << 20))
    exc = across(sent)
    assert torch.equal(exc.args[0], torch.arange(3))
    assert exc.args[1].startswith("tensor([0.")


def test_a_class_of_a_function_comes_home_as_itself() -> None:
    class Local(Exception):
        pass

    assert type(across(Local("x"))) is Local


def test_an_exception_that_cannot_be_rebuilt_is_a_replica_error_that_names_it() -> None:
    exc = across(Unprintable())
    assert type(exc) is ReplicaError
    assert "failed in forward with " in str(exc)
    assert "test_errors.Unprintable" in str(exc)


SCRIPT = '''
import subprocess, sys
from torch import nn
from evenly.team.errors import restore
from evenly.team.shipping import pack

class Lost(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b

class Net(nn.Module):
    def forward(self, x):
        raise Lost(x, self)  # the line

class Quiet(Exception):
    pass

if __name__ == "__main__":
    child = subprocess.run([sys.executable, "-c", """
import sys
from evenly.team.errors import describe
from evenly.team.shipping import unpack
net = unpack(sys.stdin.buffer.read())
try:
    net(5)
except Exception as error:
    sys.stdout.buffer.write(describe(error))
"""], input=pack(Net()).payload, stdout=subprocess.PIPE, check=True)
    try:
        raise restore(child.stdout, replica=1, device="cpu", phase="forward")
    except Lost as error:
        assert error.args == (5,) and isinstance(error.b, Net)
        assert 'raise Lost(x, self)  # the line' in str(error.__cause__), error.__cause__
        assert f'File "{__file__}", line 14, in forward' in str(error.__cause__), error.__cause__
        print("ok")
'''


def test_exceptions_of_a_script_are_caught_by_their_class(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.stdout == "ok\n", result.stderr


def test_the_whole_is_printed_as_python_prints_causes() -> None:
    exc = across(raised(lambda: int("x")))
    text = "".join(traceback.format_exception(exc))
    assert text.index("ReplicaError: replica 1 (cpu) failed in forward") < text.index("direct cause")


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (-9, "was killed by SIGKILL while running forward: often the system's out-of-memory killer"),
        (-11, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
        (3, "exited with code 3"),
        (None, "stopped answering"),
    ],
)
def test_a_death_is_explained(returncode: int | None, words: str) -> None:
    message = death_message(1, "cpu", pid=123, returncode=returncode, phase="forward", last_words="Fatal error\n")
    assert message.startswith("replica 1 (cpu, pid 123) ")
    assert words in message
    assert message.endswith("Its last words:\nFatal error")


@pytest.mark.parametrize("cls", [ReplicaError, ReplicaDied])
def test_they_can_be_pickled(cls: type[ReplicaError]) -> None:
    facts = ("message", 1, "cpu", "forward") + ((123, -9) if cls is ReplicaDied else ())
    copy = pickle.loads(pickle.dumps(cls(*facts)))
    assert type(copy) is cls
    assert vars(copy) == vars(cls(*facts))
    assert isinstance(copy, RuntimeError)
