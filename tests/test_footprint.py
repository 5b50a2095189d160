"""The leak check itself: what it must find, and what it must let pass."""

from __future__ import annotations

import os
import subprocess
import sys

from footprint import SHARED_MEMORY, Footprint, leaks_since


def leaks_at_once(before):
    return leaks_since(before, grace_seconds=0)


def test_a_child_process_is_named_with_its_command():
    before = Footprint.now()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        leaks = leaks_at_once(before)
        child.communicate(b"\n")
    assert any(leak.startswith(f"process {child.pid} ") and "input()" in leak for leak in leaks)
    assert leaks_since(before) == []


def test_a_dead_child_that_nobody_waited_for_is_named():
    before = Footprint.now()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    leaks = leaks_at_once(before)
    os.waitpid(pid, 0)
    assert [leak for leak in leaks if leak.startswith(f"process {pid} (zombie)")]
    assert leaks_at_once(before) == []


def test_an_open_descriptor_is_named_with_its_target(tmp_path):
    before = Footprint.now()
    with (tmp_path / "open").open("w") as file:
        assert leaks_at_once(before) == [f"file descriptor {file.fileno()}: {file.name}"]
    assert leaks_at_once(before) == []


def test_anonymous_shared_memory_is_named():
    before = Footprint.now()
    descriptor = os.memfd_create("forgotten")
    leaks = leaks_at_once(before)
    os.close(descriptor)
    assert leaks == [f"file descriptor {descriptor}: /memfd:forgotten (deleted)"]


def test_a_descriptor_opened_in_place_of_another_is_no_leak(tmp_path):
    first = os.open(tmp_path, os.O_RDONLY)
    before = Footprint.now()
    os.close(first)
    second = os.open("/", os.O_RDONLY)
    leaks = leaks_at_once(before)
    os.close(second)
    assert leaks == []


def test_a_file_in_shared_memory_is_named():
    file = SHARED_MEMORY / f"evenly-test-{os.getpid()}"
    before = Footprint.now()
    file.touch()
    try:
        assert leaks_at_once(before) == [f"file {file}"]
    finally:
        file.unlink()
    assert leaks_at_once(before) == []
