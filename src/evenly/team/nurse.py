"""The nursery's own process: forks replicas when the driver asks, and tells of their ends.

It has imported all that a replica needs, and does nothing but wait. A replica that has ended stays unburied until the
driver has let go of its life line: until then its process id can mean nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import marshal
import os
import resource
import select
import signal
import socket
import sys
import traceback
import warnings
from typing import NoReturn

from evenly.team.nursery import HELLO, NEWS, ORDER

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_DESCRIPTORS = 8
_LOOK_MILLISECONDS = 500
"""How often to look for the driver where the system does not tell of its end."""


class Nurse:
    """The loop of the nursery.

    Args:
        line: The end of the line on which the driver's orders come.
        driver: A descriptor that tells of the driver's end, or -1.
        driver_pid: The driver's process id.
    """

    def __init__(self, line: int, driver: int, driver_pid: int) -> None:
        self._line = socket.socket(fileno=line)
        self._driver, self._driver_pid = driver, driver_pid
        self._failure = ""
        self._lives: dict[int, int] = {}
        """Process ids by the descriptors of life lines."""
        self._ended: set[int] = set()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        for descriptor in (line, self._wake, driver):
            if descriptor >= 0:
                self._poll.register(descriptor, select.POLLIN)

    def run(self) -> NoReturn:
        """Serve until the driver is gone or wants no more replicas. Replicas that live end with this process."""
        _name("evenly-nursery")
        self._line.send(HELLO.pack(os.getpid()))
        _close_standard_streams()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, _wake_up)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._import()
        try:
            while self._driver >= 0 or self._driver_lives():
                for descriptor, _ in self._poll.poll(None if self._driver >= 0 else _LOOK_MILLISECONDS):
                    if descriptor == self._driver:
                        os._exit(0)
                    if descriptor == self._line.fileno():
                        self._take_order()
                    elif descriptor == self._wake:
                        os.read(self._wake, 4096)
                    elif descriptor in self._lives:
                        self._let_go(descriptor)
                self._look_after()
        finally:
            os._exit(0)

    def _import(self) -> None:
        """Have all that replicas need; what cannot be had, each of them will say."""
        import gc

        try:
            importlib.import_module("evenly.team.serve")
        except BaseException:
            self._failure = traceback.format_exc()
        gc.enable()
        gc.freeze()

    def _driver_lives(self) -> bool:
        try:
            os.kill(self._driver_pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it has changed its user
            pass
        return True

    def _take_order(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._line, ORDER.size, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        life = descriptors[0]
        try:
            pid = self._fork(descriptors, *ORDER.unpack(message))
        except OSError as error:
            os.write(descriptors[3], f"it could not be forked: {error}".encode())
            self._tell(life, 0, 1)
            os.close(life)
        else:
            self._lives[life] = pid
            self._tell(life, pid)
            self._poll.register(life, select.POLLIN)
        for descriptor in descriptors[1:]:
            os.close(descriptor)

    def _fork(self, descriptors: list[int], index: int, count: int) -> int:
        mother = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which this process has none
            pid = os.fork()
        if pid == 0:
            try:
                self._become(mother, descriptors, index, count)
            finally:
                os._exit(1)
        return pid

    def _become(self, mother: int, descriptors: list[int], index: int, count: int) -> None:
        """In the forked child: be the replica, from its first to its last moment."""
        life, sock, memory, last_words, *surroundings = descriptors
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != mother:
                os._exit(1)
            _name(f"evenly-replica{index}")
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (self._line.detach(), self._driver, self._wake, self._woken, life, *self._lives):
                if own >= 0:
                    os.close(own)
            _take_over(*surroundings)
            if self._failure:
                os.write(last_words, self._failure.encode())
                os._exit(1)
            serve = importlib.import_module("evenly.team.serve")
        except BaseException:
            os.write(last_words, traceback.format_exc().encode())
            os._exit(1)
        try:
            serve.main(sock, memory, last_words, index, count)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()

    def _look_after(self) -> None:
        """Tell of those that have ended, without burying them."""
        for life, pid in self._lives.items():
            if life in self._ended:
                continue
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._ended.add(life)
                by_itself = found.si_code == os.CLD_EXITED
                self._tell(life, pid, found.si_status if by_itself else -found.si_status)

    def _let_go(self, life: int) -> None:
        """The driver has closed a life line: nobody wants that replica any more."""
        pid = self._lives.pop(life)
        self._ended.discard(life)
        self._poll.unregister(life)
        os.close(life)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    @staticmethod
    def _tell(life: int, pid: int, code: int | None = None) -> None:
        with contextlib.suppress(OSError):  # nobody is there to listen: that will be seen to
            os.write(life, NEWS.pack(pid, code is not None, code or 0))


def _take_over(settings: int, folder: int, output: int, errors: int) -> None:
    """Be in the driver's place: its path, arguments, environment, processors, limits, folder and streams."""
    content = os.pread(settings, os.fstat(settings).st_size, 0)
    path, arguments, environment, processors, umask, limits = marshal.loads(content)  # noqa: S302 - the driver's own
    sys.path[:], sys.argv[:] = path, arguments
    if dict(os.environb) != environment:
        os.environb.clear()
        os.environb.update(environment)
    with contextlib.suppress(OSError):  # processors may be taken away from all of us
        os.sched_setaffinity(0, processors)
    if umask >= 0:
        os.umask(umask)
    for limit, wanted in limits:
        if resource.getrlimit(limit) != wanted:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, wanted)
    with contextlib.suppress(OSError):  # a folder that has lost its permissions
        os.fchdir(folder)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in (settings, folder, output, errors):
        os.close(descriptor)
    importlib.invalidate_caches()


def _wake_up(*_: object) -> None:
    """Do nothing: that the signal came is told by the descriptor that the poll waits for."""


def _name(name: str) -> None:
    """What `ps` and `top` call this process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def _close_standard_streams() -> None:
    """Hold nothing open that somebody waits to see closed."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:  # noqa: PLR2004 - beyond the standard streams
        os.close(null)
