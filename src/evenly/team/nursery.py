"""The nursery, as the driver sees it: one process that has imported torch, and from which replicas are forked.

[Note: two ways] To import torch takes a second or more, to fork a process that has imported it takes milliseconds. A
process that is young enough forks its nursery while it imports this package (`forking.py`). Any other starts a fresh
interpreter when replicas are first needed; so does who has changed what only a fresh import of torch would notice, and
a forked child of the driver, which has no part in its parent's nursery.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence

SWITCH = "EVENLY_PREFORK"
"""Environment variable: with "0" nothing is forked when the package is imported."""

ORDER = struct.Struct("<II")
"""What an order says beside its descriptors: the replica's index, and how many there are."""
NEWS = struct.Struct("<i?i")
"""What is told of a replica: its process id, whether it has ended, and its exit code."""
HELLO = struct.Struct("<i")
"""What a nursery says first: its process id."""

_SCRIPT = os.path.join(os.path.dirname(__file__), "start_nursery.py")  # noqa: PTH118, PTH120
_LAUNCH_SECONDS = 60
"""How long the interpreter may take to begin; importing torch is not part of it."""
_SEND_SECONDS = 10
_EARLY = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH", "PYTORCH", "PYTHON",
          "LD_", "MALLOC_", "GLIBC_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "NCCL_", "LANG", "LC_")  # fmt: skip
"""How the variables begin that are read once, when an interpreter starts or a library is loaded."""
_LIMITS = [resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK, resource.RLIMIT_AS, resource.RLIMIT_CPU]


class Nursery:
    """A nursery that was started. It ends when nobody has a use for it any more, and with the driver in any case.

    Args:
        line: Descriptor of the driver's end of the line to it; owned.
    """

    def __init__(self, line: int) -> None:
        self._line = line
        self._early = _early_variables()
        self._pid = 0

    @property
    def pid(self) -> int:
        """Its process id; 0 as long as it has not begun, and once it has ended."""
        with self._socket() as line:
            line.settimeout(0)
            try:
                hello = line.recv(HELLO.size)
                self._pid = HELLO.unpack(hello)[0] if hello else 0
            except BlockingIOError:
                pass
            except OSError:
                self._pid = 0
        return self._pid

    def kill(self) -> None:
        """End it, and all replicas that came from it; the next ones come from another."""
        if _nursery is self:
            adopt(None)
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _socket(self) -> Generator[socket.socket]:
        line = socket.socket(fileno=self._line)
        try:
            yield line
        finally:
            line.detach()

    def fits(self) -> bool:
        """Whether what it has imported is what this process would import now."""
        return self._early == _early_variables()

    def order(self, index: int, count: int, descriptors: Sequence[int]) -> None:
        """Have a replica forked.

        Raises:
            ConnectionError: The nursery is gone.
        """
        with self._socket() as line:
            line.settimeout(_SEND_SECONDS)
            try:
                # With MSG_NOSIGNAL: a nursery that is gone is no reason to end, even where SIGPIPE is.
                socket.send_fds(line, [ORDER.pack(index, count)], descriptors, socket.MSG_NOSIGNAL)
            except TimeoutError:
                raise ConnectionAbortedError from None

    def close(self) -> None:
        """Give up this process's end of the line. The nursery ends when no process has one."""
        line, self._line = self._line, -1
        if line >= 0:
            os.close(line)

    def __del__(self) -> None:
        self.close()


_nursery: Nursery | None = None
_lock = threading.Lock()


def adopt(nursery: Nursery | None) -> None:
    """Make this the nursery that replicas come from; with None the next replica has a new one started."""
    global _nursery  # noqa: PLW0603 - one per process
    _nursery = nursery


def order_replica(index: int, count: int, descriptors: Sequence[int]) -> Nursery:
    """Have a replica forked from the nursery, which is started if there is none, or if it is gone.

    Args:
        index: The replica's number.
        count: How many there are.
        descriptors: Its life line, the channel's socket and memory, and where its last words go.

    Returns:
        The nursery: the replica lives no longer than it.

    Raises:
        OSError: The interpreter cannot be run, or there is no room for another process.
        RuntimeError: The interpreter does not do what it should.
    """
    with contextlib.ExitStack() as always, _lock:
        surroundings = _surroundings(always)
        nursery = _nursery
        if nursery is not None and nursery.fits():
            with contextlib.suppress(ConnectionError):
                nursery.order(index, count, [*descriptors, *surroundings])
                return nursery
        nursery = _launch(surroundings[0])
        adopt(nursery)
        try:
            nursery.order(index, count, [*descriptors, *surroundings])
        except ConnectionError:
            adopt(None)
            message = "the process that replicas are forked from has ended at its start: was it killed?"
            raise RuntimeError(message) from None
        return nursery


def _surroundings(always: contextlib.ExitStack) -> list[int]:
    """Descriptors of what a replica takes over from the driver: settings, folder, output and errors."""
    found = [_settings(), os.open(os.curdir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    for stream in (1, 2):
        try:
            found.append(os.dup(stream))
        except OSError:  # the program has closed it
            found.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
    for descriptor in found:
        always.callback(os.close, descriptor)
    return found


def _settings() -> int:
    """A descriptor of what a replica takes over before anything of the user's is imported."""
    path = [_absolute(str(entry)) for entry in sys.path]
    limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
    settings = (path, [*map(str, sys.argv)], dict(os.environb), sorted(os.sched_getaffinity(0)), _umask(), limits)
    descriptor = os.memfd_create("evenly-settings", os.MFD_CLOEXEC)
    os.write(descriptor, marshal.dumps(settings))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _absolute(entry: str) -> str:
    """A folder of the import path by its full name; what only an import hook understands stays as it is."""
    return os.path.abspath(entry) if os.path.exists(entry or os.curdir) else entry  # noqa: PTH100, PTH110


def _umask() -> int:
    """The mask of new files' permissions, which can be asked for only by changing it, for all threads."""
    return int(process_status("Umask") or "-1", 8)


def process_status(name: str) -> str:
    """The first word of what the system says of this process under a name; empty if it says nothing."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(f"{name}:"):
                return line.split()[1]
    return ""


def _early_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_EARLY)}


def _launch(settings: int) -> Nursery:
    """Start a nursery in a fresh interpreter."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ours:
        driver = open_process(os.getpid())
        inherited = [theirs.fileno(), settings, *([driver] if driver >= 0 else [])]
        numbers = [str(number) for number in (theirs.fileno(), settings, driver, os.getpid())]
        command = [*_interpreter(), _SCRIPT, *numbers]
        try:
            code = _run(command, inherited)
        finally:
            if driver >= 0:
                os.close(driver)
        if code:
            how = f"it exited with code {code}" if code > 0 else f"it was killed by {signal.Signals(-code).name}"
            message = (
                f"the process that replicas are forked from failed to start: {how}. It was run with the interpreter "
                f"{command[0]!r} (sys.executable), which must be one that can import torch"
            )
            raise RuntimeError(message)
        return Nursery(ours.detach())


def _run(command: list[str], inherited: list[int]) -> int:
    """The exit code of the command, which leaves the nursery behind: that is nobody's child."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=inherited,
            env={**os.environ, SWITCH: "0"},
            # Ctrl-C in the terminal is for the driver alone.
            start_new_session=True,
            timeout=_LAUNCH_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        message = f"the interpreter {command[0]!r} (sys.executable) did not start within {_LAUNCH_SECONDS} s"
        raise TimeoutError(message) from None
    except OSError as error:
        message = f"cannot start a replica with the interpreter {command[0]!r} (sys.executable): {error.strerror}"
        raise type(error)(error.errno, message) from error


def _interpreter() -> list[str]:
    """The command of this interpreter with the flags that it runs with."""
    if not sys.executable:
        message = (
            "sys.executable is empty, as in some programs that embed Python: set it to the path of a Python "
            "interpreter that can import torch, for replicas to be started with"
        )
        raise RuntimeError(message)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags]


def open_process(pid: int) -> int:
    """A descriptor that tells of a process's end, or -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _after_fork() -> None:
    """In a forked child of the driver: have nothing to do with the parent's nursery."""
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    if _nursery is not None:
        _nursery.close()
    adopt(None)


os.register_at_fork(after_in_child=_after_fork)
