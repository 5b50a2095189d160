"""Shapes and strides of whole tensors, from those of a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def whole_geometry(local: Tensor, dim: int, rows: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shape and strides of the whole tensor of which ``local`` is the first replica's part along ``dim``."""
    total = sum(rows)
    shape, stride = list(local.shape), list(local.stride())
    mine, step = shape[dim], stride[dim]
    shape[dim] = total
    if mine == total or step == 0:
        return shape, stride
    if mine <= 1:
        expanded = {d for d, (size, s) in enumerate(zip(shape, stride, strict=True)) if s == 0 and size > 1}
        thin = [1 if d in expanded else size for d, size in enumerate(shape)]
        return shape, [0 if d in expanded else s for d, s in enumerate(dense_like(thin, stride))]
    # Dimensions that lie further out than the rows move apart as the rows get more.
    return shape, [s // mine * total if s >= step * mine and s % mine == 0 else s for s in stride]


def dense_like(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dense strides in the order of ``stride``. With one row its own stride tells nothing: ties keep the order."""
    order = sorted(range(len(shape)), key=lambda d: (stride[d], -d))
    result = [0] * len(shape)
    step = 1
    for d in order:
        result[d] = step
        step *= max(shape[d], 1)
    return result


def contiguous(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    return [math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))]


def writable(shape: Sequence[int], stride: Sequence[int]) -> Sequence[int]:
    """``stride``, or contiguous ones where elements would share memory."""
    return contiguous(shape) if 0 in stride else stride


def extent(tensor: Tensor) -> int:
    """Elements of memory from the beginning of the storage to the last element."""
    if tensor.numel() == 0:
        return int(tensor.storage_offset())
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor without memory that has the geometry of ``tensor``."""
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    storage = torch.UntypedStorage(extent(tensor) * tensor.element_size(), device="meta")
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def set_geometry(tensor: Tensor, like: Tensor) -> None:
    """Change shape, strides and offset of a tensor that has no memory of its own."""
    before = torch._C._meta_in_tls_dispatch_include()
    with torch._C._DisableTorchDispatch():
        # Only the meta kernels know tensors without memory; they are not chosen by themselves for a CPU tensor.
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            storage = torch.Tensor.untyped_storage(tensor)
            torch.ops.aten.set_.source_Storage_storage_offset(
                tensor, storage, like.storage_offset(), like.shape, like.stride()
            )
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)
