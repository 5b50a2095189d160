"""What the driver says to a replica, and how tensors are described on the way.

A header is a ``marshal``-encoded tuple: the fastest encoding of small built-in values that Python has, and fit for
this use because both ends are the same interpreter. Whatever else must travel is pickled beforehand into ``bytes``.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from evenly.team.memory import dense_stride

if TYPE_CHECKING:
    from evenly.team.wire import Channel

encode: Callable[[Any], bytes] = marshal.dumps
decode: Callable[[bytes], Any] = marshal.loads


class Command(IntEnum):
    """The first element of every header that the driver sends. Those marked "answers" make the replica reply."""

    STOP = 0
    RELEASE = 1
    """Forget values, graphs of calls, models, and whatever values there are in ranges of numbers."""
    SHIP = 2
    """A module by value, its parameters by reference to shared memory."""
    PATCH = 3
    """What changed on a shipped module: attributes, train/eval flags, requires_grad."""
    PROBE = 5
    """Run a throw-away copy on a few rows; answers with what the outputs are."""
    CALL = 6
    """Run forward on a shard; answers with the description of the outputs."""
    BACKWARD = 8
    """Run a call's graph backwards; answers with which gradients there are."""
    PUT = 9
    """Keep the tensor that follows under a handle."""
    DEFINE = 10
    """Remember an operation (function and arguments) under a number."""
    RUN = 11
    """Run a defined operation on values, keep its results."""
    FETCH = 12
    """Answers with a value."""
    RENAME = 14
    """Keep a value under another number."""
    GROUP = 19
    """Become part of the team's process group."""
    BROADCAST = 20
    """Receive parameters through the group."""
    REDUCE = 21
    """Bring gradients to the sum through the group."""
    EXCHANGE = 18
    """Take over the memory in which replicas add up numbers among themselves."""
    REPORT = 13
    """Answers with rows, seconds and memory used so far."""
    SYNC = 15
    """Answers with a token: after an interruption, all answers before it are passed over."""
    PARDON = 17
    """The operation before this one has failed in the driver too, which needs no second report."""


class Status(IntEnum):
    """The first element of every reply."""

    DONE = 0
    FAILED = 1
    """Followed by the exception, and by the name and number of the operation if it was one."""


DTYPES: dict[int, torch.dtype] = dict(enumerate((
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)))  # fmt: skip
"""The dtypes that travel, by number. Both ends are the same PyTorch."""
DTYPE_NUMBER: dict[torch.dtype, int] = {dtype: number for number, dtype in DTYPES.items()}

TensorSpec: TypeAlias = "tuple[Any, ...]"
"""``(dtype number, shape)`` of a contiguous tensor, plus strides where it is dense in another order, plus the shape
that it is expanded to where some of its strides are 0."""


def can_travel(tensor: Tensor) -> bool:
    """Whether the bytes of ``tensor`` describe it: a plain strided tensor of a known dtype, which has values."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return plain and tensor.dtype in DTYPE_NUMBER and (type(tensor) is Tensor or not _is_fake(tensor))


def _is_fake(tensor: Tensor) -> bool:
    """Whether it is one of the compiler's tensors, which claim to be on a device and have no values."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def wire_form(tensor: Tensor) -> tuple[TensorSpec, Tensor]:
    """A description of ``tensor`` and a contiguous tensor with its bytes, which is a view wherever possible."""
    dtype, shape = DTYPE_NUMBER[tensor.dtype], tuple(tensor.shape)
    if tensor._is_zerotensor():  # what autograd has for zeros has no memory
        tensor = torch.zeros_like(tensor)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return (dtype, shape), tensor
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if 0 in tensor.stride() and tensor.numel():
        base = tensor
        for dim, step in enumerate(tensor.stride()):
            if step == 0:
                base = base.narrow(dim, 0, 1)
        return (dtype, tuple(base.shape), None, shape), base.contiguous()
    if dense_stride(tensor) == tensor.stride() and tensor.numel():
        return (dtype, shape, tensor.stride()), tensor.as_strided((tensor.numel(),), (1,))
    return (dtype, shape), tensor.contiguous()


def receive_tensor(channel: Channel, spec: TensorSpec) -> Tensor:
    """The next tensor of a frame, in memory of its own."""
    number, shape, *more = spec
    stride, expanded = (*more, None, None)[:2]
    if stride is None:
        tensor = torch.empty(shape, dtype=DTYPES[number])
    else:
        tensor = torch.empty_strided(shape, stride, dtype=DTYPES[number])
    channel.receive_into(tensor)
    return tensor if expanded is None else tensor.expand(expanded)


def wire_forms(tensors: Sequence[Tensor]) -> tuple[tuple[TensorSpec, ...], list[Tensor]]:
    """:func:`wire_form` of several tensors."""
    forms = [wire_form(tensor) for tensor in tensors]
    return tuple(spec for spec, _ in forms), [data for _, data in forms]
