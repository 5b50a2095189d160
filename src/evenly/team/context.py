"""The ambient state of a call that must be the same in every replica: grad mode, autocast, dtypes, flags, threads."""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import random
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import torch

from evenly.team.protocol import DTYPE_NUMBER, DTYPES

Context: TypeAlias = "tuple[Any, ...]"
"""Plain values in the order of :func:`capture`, so that it can be compared and sent as it is."""


def capture(devices: int) -> Context:
    """The caller's ambient state, for a call over ``devices`` replicas."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        DTYPE_NUMBER[torch.get_autocast_dtype("cpu")],
        torch.is_autocast_cache_enabled(),
        DTYPE_NUMBER[torch.get_default_dtype()],
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        threads_per_replica(devices),
    )


def probing_context(context: Context, *, autocast: bool, dtype: torch.dtype | None) -> Context:
    """A context for trying things out: without grad, without autocast or with it, in another default dtype."""
    _, inference, enabled, autocast_dtype, cache, default, *rest = context
    default = default if dtype is None else DTYPE_NUMBER[dtype]
    return (False, inference, enabled and autocast, autocast_dtype, cache, default, *rest)


_GLOBALS = slice(5, None)


@contextlib.contextmanager
def applied(context: Context, previous: Context | None) -> Generator[None]:
    """Run a block in ``context``. Process-wide settings stay set; those that ``previous`` set alike are left alone."""
    grad, inference, autocast, autocast_dtype, cache, default_dtype, deterministic, warn_only, precision, threads = (
        context
    )
    if previous is None or context[_GLOBALS] != previous[_GLOBALS]:
        torch.set_default_dtype(DTYPES[int(default_dtype)])
        # To set it imports all of Inductor, a second's work.
        now = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        if now != (deterministic, warn_only):
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        if inference:
            stack.enter_context(torch.inference_mode())
        if autocast or not cache:
            dtype = DTYPES[int(autocast_dtype)]
            stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=autocast, cache_enabled=cache))
        with torch.set_grad_enabled(grad):
            yield


@functools.cache
def threads_per_replica(devices: int) -> int:
    """Intra-op threads of each of ``devices`` CPU replicas: the cores shared out, or what ``OMP_NUM_THREADS`` says."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // max(devices, 1)))


def shared_cores(threads: int) -> AbstractContextManager[None]:
    """Let the driver's own shard use its part of the cores, and give the caller all of them back."""
    before = torch.get_num_threads()
    return contextlib.nullcontext() if before == threads else _with_threads(threads, before)


@contextlib.contextmanager
def _with_threads(threads: int, before: int) -> Generator[None]:
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_MT19937_BYTES = 4 * 624 + 4
"""The words of a Mersenne Twister, and its position among them."""

RandomState: TypeAlias = "tuple[bytes, bytes, bytes]"


class _Digest:
    """The digest of a generator's content, which is computed anew only when the content is another."""

    def __init__(self) -> None:
        self._content: object = None
        self._digest = b""

    def of(self, content: bytes, more: object = None) -> bytes:
        """Of what a generator holds, where it lies, and of something that is not there."""
        if (content, more) != self._content:
            self._digest = _digest(content + repr(more).encode())
            self._content = content, more
        return self._digest


_torch_digest, _python_digest, _numpy_digest = _Digest(), _Digest(), _Digest()


def random_state() -> RandomState:
    """Digests of the driver's generators: torch's, Python's, and NumPy's (empty where it is not in use).

    Every replica seeds itself from them at each call, so that a seed, or a restored state, reproduces a run. Each
    generator has a digest of its own: who seeds only torch's has a right to the same numbers from torch, whatever
    the others, which nobody seeded, happen to be.
    """
    generator = torch.get_rng_state()
    content = ctypes.string_at(generator.data_ptr(), generator.numel())  # `bytes(storage)` takes 7 ms
    return (
        _torch_digest.of(content),
        _python_digest.of(_python_content(), _half_a_pair()),
        _numpy_state(),
    )


def _python_generator() -> random.Random:
    return cast("Any", random)._inst  # what random.random() and its kin use


def _half_a_pair() -> object:
    """The second of two normally distributed numbers, if nobody has asked for it yet."""
    return getattr(_python_generator(), "gauss_next", None)


def _python_content() -> bytes:
    """What Python's generator holds. Asking for it takes 15 us, looking where it lies less than one."""
    generator = _python_generator()
    if _WORDS_LIE_BEHIND_THE_HEADER and type(generator) is random.Random:
        return ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES)
    return _packed(generator)


def _packed(generator: random.Random) -> bytes:
    *words, position = generator.getstate()[1]
    return array.array("I", [position, *words]).tobytes()


def _lies_behind_the_header() -> bool:
    """Whether a generator's memory looks as CPython's source says, tried out on one."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    generator = random.Random(1)  # noqa: S311 - a guinea pig
    generator.random()  # so that its position is none that others have
    return ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES) == _packed(generator)


_WORDS_LIE_BEHIND_THE_HEADER = _lies_behind_the_header()


def _numpy_generator() -> Any:
    """NumPy's common generator, if NumPy is in use and it is of the usual kind."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator: Any = getattr(getattr(numpy.random.mtrand, "_rand", None), "_bit_generator", None)
    return generator if type(generator).__name__ == "MT19937" else None


def _numpy_content(generator: Any) -> bytes:
    # Where it lies: asking for its state takes 25 us, more than a small operation.
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _numpy_state() -> bytes:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return b""
    generator = _numpy_generator()
    if generator is not None:
        return _numpy_digest.of(_numpy_content(generator))
    return _digest(pickle.dumps(numpy.random.get_state(legacy=False)))


_seeded: dict[str, tuple[int, bytes]] = {}
"""What Python's and NumPy's generators were seeded with last, and what they held then."""


def seed(state: RandomState, replica: int) -> None:
    """Seed this process's generators from the driver's :func:`random_state` and the replica's number."""
    salt = replica.to_bytes(8, "little")
    torch_seed, python_seed, numpy_seed = [int.from_bytes(_digest(digest, salt), "little") for digest in state]
    torch.default_generator.manual_seed(torch_seed)
    # These two take longer to seed than to look at, and few models draw from them.
    if _seeded.get("python") != (python_seed, _python_content()) or _half_a_pair() is not None:
        random.seed(python_seed)
        _seeded["python"] = python_seed, _python_content()
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    # Where only the replica has loaded NumPy, nobody can have seeded it.
    numpy_seed = (numpy_seed if state[2] else torch_seed) % 2**32
    generator = _numpy_generator()
    if generator is None or _seeded.get("numpy") != (numpy_seed, _numpy_content(generator)):
        numpy.random.seed(numpy_seed)
        if generator is not None:
            _seeded["numpy"] = numpy_seed, _numpy_content(generator)


def _digest(content: bytes, salt: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=8, salt=salt).digest()
