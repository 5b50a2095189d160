"""The ambient state of a call that must be the same in every replica: grad mode, autocast, dtypes, flags, threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import random
import sys
from collections.abc import Generator
from typing import Any, TypeAlias

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


@contextlib.contextmanager
def shared_cores(threads: int) -> Generator[None]:
    """Let the driver's own shard use its part of the cores, and give the caller all of them back."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_MT19937_BYTES = 4 * 624 + 4
"""The words of a Mersenne Twister, and its position among them."""

RandomState: TypeAlias = "tuple[bytes, bytes, bytes]"


def random_state() -> RandomState:
    """Digests of the driver's generators: torch's, Python's, and NumPy's (empty where it is not in use).

    Every replica seeds itself from them at each call, so that a seed, or a restored state, reproduces a run. Each
    generator has a digest of its own: who seeds only torch's has a right to the same numbers from torch, whatever
    the others, which nobody seeded, happen to be.
    """
    generator = torch.get_rng_state()
    content = ctypes.string_at(generator.data_ptr(), generator.numel())  # `bytes(storage)` takes 7 ms
    _, numbers, gauss = random.getstate()
    python = repr((hash(numbers), gauss)).encode()  # numbers have the same hash in all processes, None has not
    return _digest(content), _digest(python), _numpy_state()


def _numpy_state() -> bytes:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return b""
    generator: Any = getattr(getattr(numpy.random.mtrand, "_rand", None), "_bit_generator", None)
    if type(generator).__name__ == "MT19937":
        # NumPy's usual one, where it lies: asking for its state takes 25 us, more than a small operation.
        return _digest(ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES))
    return _digest(pickle.dumps(numpy.random.get_state(legacy=False)))


def seed(state: RandomState, replica: int) -> None:
    """Seed this process's generators from the driver's :func:`random_state` and the replica's number."""
    salt = replica.to_bytes(8, "little")
    torch_seed, python_seed, numpy_seed = [int.from_bytes(_digest(digest, salt), "little") for digest in state]
    torch.default_generator.manual_seed(torch_seed)
    random.seed(python_seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # Where only the replica has loaded NumPy, nobody can have seeded it.
        numpy.random.seed((numpy_seed if state[2] else torch_seed) % 2**32)


def _digest(content: bytes, salt: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=8, salt=salt).digest()
