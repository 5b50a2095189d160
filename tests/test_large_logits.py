"""Logits over a large vocabulary stay where they are: the driver never holds those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenly.sharded import ShardedTensor, gathered
from parity import compare, wrap

VOCABULARY = 50_000
ROW_BYTES = 4 * VOCABULARY
ROWS = 7
LABELS = torch.tensor([3, -100, -100, 7, 49_999, -100, 12])


class LargestTensor(TorchDispatchMode):
    """Looks for the most bytes of any plain tensor that is made in the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, ShardedTensor):
                self.size = max(self.size, leaf.untyped_storage().nbytes())
        return result


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 2), nn.Linear(2, VOCABULARY, bias=False))


def losses_of(model: nn.Module, watch: LargestTensor | None = None) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(4):
        tokens = (torch.arange(ROWS) + step) % 16
        if watch is not None:
            watch.__enter__()
        try:
            optimizer.zero_grad()
            logits = model(tokens)
            loss = F.cross_entropy(logits, LABELS, reduction="mean")
            loss.backward()
            losses += [loss.detach(), (logits.argmax(-1) == LABELS).sum()]
        finally:
            if watch is not None:
                watch.__exit__(None, None, None)
        optimizer.step()
    return losses


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_loop_over_a_large_vocabulary_never_holds_the_whole_batchs_logits_in_the_driver(replicas):
    bare = language_model()
    whole = LargestTensor()
    expected = losses_of(bare, whole)
    assert whole.size == ROWS * ROW_BYTES
    module = language_model()
    model = wrap(module, replicas)
    model(torch.arange(ROWS))  # the probe of the first call is about a few rows, and may hold these
    gathered.clear()
    own = LargestTensor()
    found = losses_of(model, own)
    assert not gathered
    assert own.size == -(-ROWS // replicas) * ROW_BYTES
    compare(found, expected)
    compare(list(module.parameters()), list(bare.parameters()))
    with own:
        model(torch.arange(ROWS)).full_tensor()
    assert own.size == ROWS * ROW_BYTES
