"""Evenly: train PyTorch models on several devices by changing one line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from evenly.data_parallel import DataParallel, data_parallel
from evenly.team.forking import fork_nursery

if TYPE_CHECKING:
    from evenly import checkpoint
    from evenly.batch import replicate, samples
    from evenly.batchwide import whole_batch
    from evenly.report import ReplicaReport
    from evenly.sharded import ShardedTensor
    from evenly.team.errors import ReplicaDied, ReplicaError

__all__ = [
    "DataParallel",
    "ReplicaDied",
    "ReplicaError",
    "ReplicaReport",
    "ShardedTensor",
    "checkpoint",
    "data_parallel",
    "replicate",
    "samples",
    "whole_batch",
]

# Imported when they are first asked for: what runs a step takes longer to import than a script that only builds
# models, or loads a checkpoint, should have to wait.
_LATER = {
    "ReplicaDied": "evenly.team.errors",
    "ReplicaError": "evenly.team.errors",
    "ReplicaReport": "evenly.report",
    "ShardedTensor": "evenly.sharded",
    "replicate": "evenly.batch",
    "samples": "evenly.batch",
    "whole_batch": "evenly.batchwide",
}


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return importlib.import_module("evenly.checkpoint")
    if name not in _LATER:
        message = f"module 'evenly' has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


fork_nursery()
