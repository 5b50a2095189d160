"""Tensors of one dtype as one flat tensor, and back; PyTorch's own helpers have no annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from torch import _utils as utils

_torch: Any = utils


def join(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor with the elements of all; never a view of one of them."""
    joined = cast("Tensor", _torch._flatten_dense_tensors(list(tensors)))
    return joined.clone() if len(tensors) == 1 else joined  # a single tensor would not be copied


def split(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of what :func:`join` made, in the shapes of ``like``."""
    return list(cast("tuple[Tensor, ...]", _torch._unflatten_dense_tensors(joined, list(like))))
