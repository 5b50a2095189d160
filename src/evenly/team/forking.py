"""The nursery forked from the driver itself, while it imports this package: see [Note: two ways].

At this moment a program has torch, and hardly anything else: later its memory holds models and data, of which a forked
process would keep every page that the program gives back, and it has threads, which a fork cuts off in the middle of
what they do. Where it has done more than import packages, nothing is forked (:func:`_is_young`).

What the packages that it has imported know is what they know in the driver at this moment. That is as good as what
they would know if they were imported anew, or better: a change that the program has made to them counts in replicas,
too. Its own modules are another matter: they are edited and loaded again, so replicas import them themselves.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import random
import signal
import socket
import sys
import threading
import types
import warnings
from typing import Any, NoReturn

from evenly.team.nursery import SWITCH, Nursery, adopt, open_process, process_status

_HEAP_BYTES = 512 << 20
"""A fresh import of torch has some 150 MiB of its own; a program with much more has loaded data."""
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/tty", "/dev/pts/", "/dev/urandom", "/dev/random", "/dev/console",
                     "/dev/shm/")  # fmt: skip # noqa: S108
_GO = b"!"

_keep: list[object] = []
"""In the nursery: what is the driver's, and must not be finalized there."""


def fork_nursery() -> None:
    """Fork the nursery if this process is young enough; else replicas get one when they are first needed."""
    if not _is_young():
        return
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return
    driver, pid = open_process(os.getpid()), os.getpid()
    with ours, theirs:
        try:
            child = _fork()
        except OSError:
            child = -1
        if child == 0:
            _begin(theirs, ours, driver, pid)
        if driver >= 0:
            os.close(driver)
        if child < 0:
            return
        theirs.close()
        # Threads that Python does not know of show only now: a library may end its own when it is told of a fork.
        alone = len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
        if alone:
            ours.send(_GO)
        else:
            ours.shutdown(socket.SHUT_RDWR)
        os.waitpid(child, 0)
        if alone:
            adopt(Nursery(ours.detach()))


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: they are counted afterwards
        return os.fork()


def _begin(line: socket.socket, other: socket.socket, driver: int, pid: int) -> NoReturn:
    """In the forked child: wait for the word, then leave the nursery behind as nobody's child.

    A program that waits for its children shall not meet one that it knows nothing of.
    """
    try:
        other.close()
        if line.recv(len(_GO)) == _GO and _fork() == 0:
            descriptor = line.detach()
            _forget_driver(descriptor, driver)
            from evenly.team.nurse import Nurse

            Nurse(descriptor, driver, pid).run()
    finally:
        os._exit(0)


# ---------------------------------------------------------------------- before


def _is_young() -> bool:
    """Whether this process has done nothing yet that should not be in a replica."""
    return (
        os.environ.get(SWITCH, "1") != "0"
        and sys.platform == "linux"
        and threading.current_thread() is threading.main_thread()
        and threading.active_count() == 1
        and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL  # nobody would hear of the short-lived child
        and not _is_a_worker()
        and not _is_watched()
        and not logging.root.handlers  # they write to files of the driver's
        and not _has_state()
        and not _has_own_modules()
        and not _has_devices()
        and _heap_bytes() < _HEAP_BYTES
    )


def _is_a_worker() -> bool:
    """Whether this is a process of `multiprocessing`, which has its tasks, or a replica."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _is_watched() -> bool:
    """Whether a debugger, a profiler or a coverage tool follows what this process does."""
    monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12
    tools = () if monitoring is None else [monitoring.get_tool(number) for number in range(6)]
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


def _has_state() -> bool:
    """Whether modes of torch are switched on, or accelerators."""
    import torch

    return (
        torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.cuda.is_initialized()
    )


def _has_own_modules() -> bool:
    """Whether modules of the program itself have been imported, or others halfway."""
    libraries = _library_folders()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("evenly", "__main__", "__mp_main__"):
            continue
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None)
        if getattr(spec, "_initializing", False):
            return True
        if isinstance(file, str) and file.startswith(os.sep) and not file.startswith(libraries):
            return True
    return False


def _library_folders() -> tuple[str, ...]:
    """Where the standard library and installed packages are."""
    import torch

    folders = {os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__))}  # noqa: PTH120
    folders.update(entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages")))
    return tuple(os.path.join(folder, "") for folder in folders)  # noqa: PTH118


def _has_devices() -> bool:
    """Whether a device file is open: a driver of an accelerator that is in use cannot be forked."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:  # the descriptor that lists the folder
            continue
        if target.startswith("/dev/") and not target.startswith(_HARMLESS_DEVICES):
            return True
    return False


def _heap_bytes() -> int:
    return int(process_status("RssAnon") or "0") << 10


# ---------------------------------------------------------------------- after


def _forget_driver(line: int, driver: int) -> None:
    """Be as a fresh interpreter that has imported torch: nothing of the driver's is held or goes on here."""
    os.setsid()  # Ctrl-C in the terminal is for the driver alone
    os.chdir("/")
    _keep.append(sys.modules["__main__"])
    sys.modules["__main__"] = types.ModuleType("__main__")
    # Objects that nobody refers to any more, and the collector would find only now, may close what is not theirs here.
    gc.freeze()
    _replace_descriptors({line, driver})
    _replace_streams()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does at its start
    signal.set_wakeup_fd(-1)
    # This module is being imported for ever, which others that import it would wait for.
    sys.modules["evenly"].__spec__._initializing = False  # type: ignore[union-attr]
    random.seed()


def _replace_descriptors(ours: set[int]) -> None:
    """Let go of all that is open here: whoever waits for its end waits for the driver alone.

    The numbers stay taken, by nothing: objects of the driver's that are still here must not meet others behind them.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        number = int(name)
        if number not in ours and number != null:
            try:
                os.fstat(number)
            except OSError:  # the descriptor that lists the folder
                continue
            os.dup2(null, number, inheritable=False)
    os.close(null)


def _replace_streams() -> None:
    """Text streams as Python makes them at its start, without what the driver has not written yet."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before: Any = getattr(sys, f"__{name}__")
        _keep.extend((before, getattr(sys, name)))
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        buffer: Any = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        errors = "backslashreplace" if name == "stderr" else getattr(before, "errors", None)
        stream = io.TextIOWrapper(
            buffer, getattr(before, "encoding", None), errors, line_buffering=name == "stderr",
            write_through=getattr(before, "write_through", False),
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
