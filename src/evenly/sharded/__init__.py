"""One tensor to the user, rows on many devices.

A :class:`ShardedTensor` looks like the tensor of the whole batch. Its rows stay where they were computed: the first
ones here, the others in the replicas. Operations reach it *below* autograd, so the driver's autograd graph is an
ordinary one. What an operation does to shards is looked up in :mod:`evenly.rules`; what is not known there is done on
the gathered tensor, exactly as PyTorch would.
"""

from evenly.sharded.content import Parts, Shards
from evenly.sharded.dtensor import spare_import
from evenly.sharded.gathering import gathered
from evenly.sharded.tensor import ShardedTensor, plain

__all__ = ["Parts", "ShardedTensor", "Shards", "gathered", "plain"]

spare_import()
