"""Tensors that are conjugated, or negated, only when they are used.

Below autograd PyTorch takes for granted that this has been done already, and would use the bytes as they are. For
operands it holds, for rows it does not: nobody could look inside of a sharded tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

_Key = torch._C.DispatchKey


def respected() -> AbstractContextManager[object]:
    """While it is active, operations below autograd look after this by themselves, too."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (_Key.Conjugate, _Key.Negative):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)
