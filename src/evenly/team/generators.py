"""Random number generators of the model's own: kept on a module, or given to it as an argument.

A replica's copy must not draw the numbers that the driver's draws. As with the global generators, it is seeded at each
call from the state of the driver's and the replica's number, so that a seed, or a restored state, reproduces a run.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import nn

_TABLES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}

Generator: TypeAlias = "torch.Generator | random.Random | Any"
"""PyTorch's, Python's or NumPy's."""


States: TypeAlias = "tuple[tuple[str, bytes], ...]"
"""Where each generator is, and a digest of its state."""


class Generators:
    """Those on the modules of a model: attributes, and what is in their lists, tuples and dicts."""

    def __init__(self, module: nn.Module) -> None:
        self._found = {
            f"{position}.{path}": generator
            for position, owner in enumerate(module.modules())
            for path, generator in _in_attributes(vars(owner))
        }

    def states(self) -> States:
        """In the driver: what the copies are to be seeded from."""
        return tuple([(path, _state_of(generator)) for path, generator in self._found.items()])

    def seed(self, states: States, replica: int) -> None:
        """In a replica: seed the copies. Those that its own forward has made since are its own."""
        for path, state in states:
            if path in self._found:
                _seed(self._found[path], state, replica)


Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


def with_own_numbers(call: Call, number: int) -> Call:
    """In a replica: seed generators that came as arguments, and so hold the state of the driver's."""
    args, kwargs = call
    for argument in (*args, *kwargs.values()):
        if _is_generator(argument):
            _seed(argument, _state_of(argument), number)
    return call


def _state_of(generator: Generator) -> bytes:
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return _digest(ctypes.string_at(state.data_ptr(), state.numel()))
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return _digest(repr((version, hash(numbers), gauss)).encode())  # numbers hash alike in all processes
    numpy = sys.modules["numpy"]
    if isinstance(generator, numpy.random.RandomState):
        return _digest(pickle.dumps(generator.get_state(legacy=False)))
    return _digest(pickle.dumps(generator.bit_generator.state))


def _seed(generator: Generator, state: bytes, replica: int) -> None:
    seed = int.from_bytes(_digest(state, replica.to_bytes(8, "little")), "little")
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, sys.modules["numpy"].random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _is_generator(value: object) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _in_attributes(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Generator]]:
    for name, value in attributes.items():
        if _is_generator(value):
            yield name, value
            continue
        items: Iterable[tuple[Any, Any]] = ()
        if type(value) in {list, tuple}:
            items = enumerate(cast("Sequence[Any]", value))
        elif type(value) is dict and name not in _TABLES:
            items = cast("dict[Any, Any]", value).items()
        for key, item in items:
            if _is_generator(item):
                yield f"{name}[{key!r}]", item


def _digest(content: bytes, salt: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=8, salt=salt).digest()
