"""Evenly: train PyTorch models on several devices by changing one line."""

from evenly import checkpoint
from evenly.batch import replicate, samples
from evenly.data_parallel import DataParallel, ReplicaReport, data_parallel
from evenly.sharded import ShardedTensor
from evenly.team.errors import ReplicaDied, ReplicaError
from evenly.whole_batch import whole_batch

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
