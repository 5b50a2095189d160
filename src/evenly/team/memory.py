"""Shared memory that several processes see as tensors.

Blocks are anonymous (``memfd_create``): they have no name, need no room in ``/dev/shm`` and vanish with the last
process that maps them, however it ends.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE

_ALIGNMENT = 64  # bytes: a cache line, and what vectorised kernels like best


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies in a block, in bytes, and its geometry, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """Elements from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class Block:
    """A piece of shared memory, mapped into this process.

    Args:
        descriptor: A file descriptor of the memory; it is owned (closed) by the block.
        size: Bytes.
    """

    def __init__(self, descriptor: int, size: int, *, private: bool = False) -> None:
        self.size = size
        self.descriptor = descriptor
        self._map = _map(descriptor, max(size, 1), mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)

    @classmethod
    def allocate(cls, size: int) -> Block:
        """New zeroed memory. Pages are taken from the system when they are first written."""
        descriptor = os.memfd_create("evenly-tensors", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(size, 1))
        return cls(descriptor, size)

    def tensor(self, place: Placement) -> Tensor:
        """The tensor at ``place``, which keeps the mapping alive.

        It has a storage of its own extent only, so that ``torch.save`` of one tensor does not write its neighbours.
        """
        extent = place.extent
        if extent == 0:
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=extent, offset=place.offset)
        return flat.as_strided(place.shape, place.stride)

    def private(self) -> Block:
        """The same memory, but what is written through this block is seen by nobody else (copy on write)."""
        return Block(os.dup(self.descriptor), self.size, private=True)

    def close(self) -> None:
        """Give the descriptor back. Tensors stay valid: the mapping goes with the last of them."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


def _map(descriptor: int, size: int, flags: int) -> memoryview:
    """Map memory as a buffer, which is unmapped when the last reference goes.

    Python's own ``mmap`` keeps a descriptor open for as long as the mapping lives, and a model has several.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes of shared memory: {os.strerror(number)}")
    buffer = view_memory(address, size)
    unmap = weakref.finalize(buffer, _libc.munmap, address, size)
    unmap.atexit = False  # tensors may still be in use then, and the system unmaps in any case
    return buffer


def view_memory(address: int, size: int) -> memoryview:
    """Memory as bytes. An array of ctypes has a class of its own for every size, left to the garbage collector."""
    return _view_memory(address, size, _WRITABLE)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of ``tensor`` if it is dense (channels_last and transposed ones, too), else contiguous ones."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if tensor.is_contiguous():
        return stride
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return contiguous_stride(shape)
        expected *= size
    return stride


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def lay_out(tensors: Sequence[Tensor]) -> tuple[list[Placement], int]:
    """Places one after the other for tensors like these, and the bytes needed for all."""
    places: list[Placement] = []
    offset = 0
    for tensor in tensors:
        place = Placement(offset, tuple(tensor.shape), dense_stride(tensor), tensor.dtype)
        places.append(place)
        offset += -(-place.extent * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return places, offset
