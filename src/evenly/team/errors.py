"""What went wrong in a replica, as the user should see it.

An exception crosses over as what it consists of: where its class is found, its arguments and attributes one
by one, its traceback as places in files. The driver rebuilds it with the class that the user's `except`
clause names.

[Note: raised later] An exception that was kept before it is raised must not stay in a local variable of a frame that
raises it: its traceback refers to the frame, and the two would keep each other, and all tensors in sight, alive until
the garbage collector comes by.
"""

from __future__ import annotations

import importlib
import io
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from evenly.team.shipping import pack, unpack
from evenly.team.tracebacks import Link, Place, chain_of, render_chain

__all__ = ["ReplicaDied", "ReplicaError", "death_message", "describe", "restore"]


class ReplicaError(RuntimeError):
    """Something failed in a replica.

    It is the ``__cause__`` of the exception that the driver raises, and tells where that came from; where the
    exception's own type could not be rebuilt, it is raised itself.

    Attributes:
        replica: Which replica; the driver is 0.
        device: Its device, e.g. ``"cuda:1"``.
        phase: What it was doing, e.g. ``"forward"``.
    """

    def __init__(self, message: str, replica: int, device: str, phase: str) -> None:
        super().__init__(message)
        self.replica = replica
        self.device = device
        self.phase = phase

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.replica, self.device, self.phase)


class ReplicaDied(ReplicaError):  # noqa: N818 - it says what happened
    """The process of a replica came to an end that nobody asked for.

    Attributes:
        pid: Its process id.
        returncode: As in :mod:`subprocess`: the exit code, or minus the signal; None if unknown.
    """

    def __init__(self, message: str, replica: int, device: str, phase: str, pid: int, returncode: int | None) -> None:
        super().__init__(message, replica, device, phase)
        self.pid = pid
        self.returncode = returncode

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*super().__reduce__()[1], self.pid, self.returncode)


@dataclass
class _Value:
    """A value that may not survive the journey: its parcel and, in any case, how it looked."""

    look: str
    parcel: bytes | None


@dataclass
class _Description:
    module: str
    qualname: str
    args: list[_Value]
    attributes: dict[str, _Value]
    recipe: _Value | None
    cls: _Value
    text: str
    chain: list[Link]


def describe(exc: BaseException) -> bytes:
    """Makes bytes of an exception, in the replica; :func:`restore` reads them.

    Never fails because of what the exception holds: an argument that cannot travel is replaced by its
    ``repr``, an attribute that cannot is left out and named in a note.
    """
    cls = type(exc)
    recipe = None
    if _defines(cls, "__reduce__", "__reduce_ex__") or not _defines(cls, "__init__", "__new__", "__slots__"):
        recipe = _value_of(lambda: exc.__reduce_ex__(5))
    description = _Description(
        module=cls.__module__,
        qualname=cls.__qualname__,
        args=[_value(arg) for arg in _builtin_base(cls).__reduce__(exc)[1]],
        attributes={name: _value(value) for name, value in _attributes(exc).items()},
        recipe=recipe,
        cls=_value(cls),
        text=_safely(str, exc),
        chain=chain_of(exc),
    )
    return pickle.dumps(description)


def restore(data: bytes, *, replica: int, device: str, phase: str, called_at: Place | None = None) -> BaseException:
    """Rebuilds in the driver the exception that :func:`describe` described in a replica.

    Args:
        data: What :func:`describe` returned.
        replica: Where it was raised; the driver is 0.
        device: That replica's device.
        phase: What it was doing, e.g. ``"forward"``.
        called_at: The line of the user's program that asked for it, if its traceback does not show one.

    Returns:
        An exception to raise. It is of its own type where that can be found (first by name in this process,
        so that ``except MyError`` works for classes of the script, too), with arguments, attributes, notes,
        and a :class:`ReplicaError` as its ``__cause__``; otherwise it is a :class:`ReplicaError` that names
        the type.
    """
    description: _Description = pickle.loads(data)
    if called_at is not None:
        description.chain[-1].frames.insert(0, called_at)
    story = render_chain(description.chain)
    where = f"replica {replica} ({device}) failed in {phase}"
    exc = _rebuild(description)
    if exc is None:
        name = f"{description.module}.{description.qualname}"
        message = f"{where} with {name}, a type that cannot be rebuilt here: {description.text}\n\n{story}"
        return ReplicaError(message, replica, device, phase)
    exc.__cause__ = ReplicaError(f"{where}:\n\n{story}", replica, device, phase)
    return exc


_LONGEST_LOOK = 500  # characters
_LARGEST_VALUE = 1 << 20  # bytes; an exception that holds a batch need not bring it home


def _value(value: object) -> _Value:
    return _value_of(lambda: value)


def _value_of(get: Callable[[], object]) -> _Value:
    look = "?"
    try:
        value = get()
        look = _safely(repr, value)[:_LONGEST_LOOK]
        parcel = pack(value, homeward=True)
        if sum(tensor.nbytes for tensor in parcel.tensors) + len(parcel.payload) > _LARGEST_VALUE:
            return _Value(look, None)
        file = io.BytesIO()
        if parcel.tensors:
            torch.save([tensor.cpu() for tensor in parcel.tensors], file)
        return _Value(look, pickle.dumps((parcel.payload, file.getvalue())))
    except Exception:
        return _Value(look, None)


def _unpack_value(value: _Value) -> Any:
    if value.parcel is None:
        raise ValueError(value.look)
    payload, saved = pickle.loads(value.parcel)
    return unpack(payload, torch.load(io.BytesIO(saved), weights_only=True) if saved else ())


def _attributes(exc: BaseException) -> dict[str, object]:
    attributes = dict(vars(exc))
    for cls in type(exc).__mro__:
        slots: Any = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(exc, name):
                attributes[name] = getattr(exc, name)
    return attributes


def _safely(text_of: Callable[[Any], str], value: object) -> str:
    try:
        return text_of(value)
    except Exception:
        return f"<{type(value).__qualname__}>"


def _rebuild(description: _Description) -> BaseException | None:
    """The exception as its own type, or None."""
    cls = _find_class(description)
    if cls is None:
        return None
    for make in (_by_recipe, _by_parts):
        try:
            exc = make(cls, description)
            str(exc)  # as every traceback and log will do
        except Exception:  # noqa: S112 - the next way, or none
            continue
        if type(exc) is cls:
            return exc
    return None


def _find_class(description: _Description) -> type[BaseException] | None:
    for find in (_class_by_name, _class_by_value):
        try:
            cls = find(description)
        except Exception:  # noqa: S112 - the next way, or none
            continue
        if isinstance(cls, type) and issubclass(cls, BaseException):
            return cls
    return None


def _class_by_name(description: _Description) -> Any:
    module = description.module
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for name in description.qualname.split("."):
        found = getattr(found, name)
    return found


def _class_by_value(description: _Description) -> Any:
    return _unpack_value(description.cls)


def _by_recipe(cls: type[BaseException], description: _Description) -> BaseException:
    """By the class's own ``__reduce__``."""
    if description.recipe is None:
        raise ValueError
    make, args, *rest = _unpack_value(description.recipe)
    exc = cls(*args) if isinstance(make, type) else make(*args)
    if rest and rest[0]:
        exc.__setstate__(rest[0])
    return exc


def _by_parts(cls: type[BaseException], description: _Description) -> BaseException:
    """Without ``__init__``, which may want other arguments than those that ``args`` keeps."""
    args = tuple(_or_look(arg) for arg in description.args)
    builtin = _builtin_base(cls)
    exc: BaseException = builtin.__new__(cls, *args)
    # Fills what the C types keep outside args and __dict__: OSError.filename, StopIteration.value, ...
    builtin.__init__(exc, *args)
    lost: list[str] = []
    for name, value in description.attributes.items():
        try:
            setattr(exc, name, _unpack_value(value))
        except Exception:
            lost.append(f"{name} = {value.look}")
    if lost:
        # As add_note, which Python 3.10 lacks.
        notes = [*getattr(exc, "__notes__", ()), f"attributes that stayed in the replica: {', '.join(lost)}"]
        vars(exc)["__notes__"] = notes
    return exc


def _or_look(value: _Value) -> Any:
    try:
        return _unpack_value(value)
    except Exception:
        return value.look


def _is_python_class(cls: type) -> bool:
    return bool(cls.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE


def _defines(cls: type, *names: str) -> bool:
    """Whether a class written in Python, and not a builtin base, defines one of `names`."""
    owners = (next((base for base in cls.__mro__ if name in vars(base)), object) for name in names)
    return any(map(_is_python_class, owners))


def _builtin_base(cls: type[BaseException]) -> Any:
    return next(base for base in cls.__mro__ if not _is_python_class(base))


_LIKELY_CAUSES = {
    "SIGKILL": "often the system's out-of-memory killer (see `dmesg`), or a limit of the container or job",
    "SIGTERM": "somebody asked it to stop: a job scheduler, or `kill`",
    "SIGINT": "somebody interrupted it",
    "SIGHUP": "its terminal went away",
    "SIGSEGV": "a crash in native code: an extension or a driver, or an index out of bounds there",
    "SIGBUS": "a crash in native code, or no room left for shared memory",
    "SIGFPE": "a crash in native code, such as an integer division by zero",
    "SIGILL": "native code that was built for another processor",
    "SIGABRT": "native code gave up: a failed assertion, or memory that could not be had",
}


def death_message(
    replica: int, device: str, *, pid: int, returncode: int | None, phase: str, last_words: str = ""
) -> str:
    """Says how a replica died, why that may be, and what follows.

    Args:
        replica: Which replica.
        device: Its device.
        pid: Its process id.
        returncode: As in :mod:`subprocess`: the exit code, or minus the signal; None if unknown.
        phase: What it was doing, e.g. ``"forward"``.
        last_words: What it wrote to stderr at the end, e.g. faulthandler's report.
    """
    who = f"replica {replica} ({device}, pid {pid})"
    when = f"while it was {phase}" if phase in ("idle", "starting") else f"while running {phase}"
    if returncode is None:
        message = f"{who} stopped answering {when}: its channel was closed"
    elif returncode < 0:
        name = _signal_name(-returncode)
        message = f"{who} was killed by {name} {when}"
        if name in _LIKELY_CAUSES:
            message += f": {_LIKELY_CAUSES[name]}"
    elif phase == "starting":
        message = f"{who} failed to start: it exited with code {returncode}"
    else:
        message = f"{who} exited with code {returncode} {when}: something called os._exit()"
    message += ". The next call starts a new replica."
    if last_words.strip():
        message += f"\n\nIts last words:\n{last_words.rstrip()}"
    return message


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
