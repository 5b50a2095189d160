"""What is trained: small models of different character, each with a few fixed synthetic batches.

Every workload is known by its name, so that processes need to be told nothing else. Names with a number make one of a
family: `parameters-10` has 10 million parameters, `tensors-500` has 500 parameter tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCHES = 4
SEED = 20

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss.

    Attributes:
        name: By which it is found.
        build: Makes the module; the same one for the same seed.
        draw: Makes a batch: inputs and targets.
        loss: Of outputs and targets; outside of `forward`.
        update: Whether a step ends with the optimizer's.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    update: bool = True

    def module(self) -> nn.Module:
        """The module with its initial parameters, always the same ones."""
        torch.manual_seed(SEED)
        return self.build()

    def batches(self) -> list[Batch]:
        """The batches, always the same ones."""
        generator = torch.Generator().manual_seed(SEED)
        return [self.draw(generator) for _ in range(BATCHES)]


def find(name: str) -> Workload:
    """The workload of this name.

    Raises:
        ValueError: There is none.
    """
    family, _, size = name.rpartition("-")
    if name in _FIXED:
        return _FIXED[name]()
    if family in _FAMILIES and size.isdigit():
        return _FAMILIES[family](name, int(size))
    raise ValueError(
        f"there is no workload {name!r}: choose from {', '.join((*_FIXED, *(f'{f}-N' for f in _FAMILIES)))}"
    )


# ---------------------------------------------------------------------- data


def _vectors(rows: int, *shape: int, classes: int = 10) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        x = torch.randn(rows, *shape, generator=generator)
        return x, torch.randint(classes, (rows,), generator=generator)

    return draw


def _tokens(rows: int, length: int, vocabulary: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        pieces = torch.randint(vocabulary, (rows, length + 1), generator=generator)
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()

    return draw


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------- models


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _conv() -> nn.Sequential:
    layers: list[nn.Module] = []
    before = 3
    for channels, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1)):
        layers += [nn.Conv2d(before, channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class Block(nn.Module):
    """Causal self-attention and a small MLP, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of shape `(B, T, C)`, as is the result."""
        B, T, C = x.shape
        q, k, v = (
            self.query_key_value(self.attention_norm(x))
            .view(B, T, 3, self.heads, C // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Tokens `(B, T)` in, logits of the next token `(B, T, V)` out."""

    def __init__(
        self, vocabulary: int, *, width: int = 256, layers: int = 4, heads: int = 4, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for matrix in (self.tokens.weight, self.positions.weight, self.head.weight):
            nn.init.normal_(matrix, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class Fan(nn.Module):
    """Many small layers side by side: only their number matters."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(tensors // 2))

    def forward(self, x: Tensor) -> Tensor:
        """Add up what the layers say: `(B, 8)` to `(B, 8)`."""
        total = x
        for layer in self.layers:
            total = total + layer(x)
        return total / len(self.layers)


def _parameters(name: str, millions: int) -> Workload:
    width = round(math.sqrt(millions * 1e6 / 4) / 16) * 16
    return Workload(name, lambda: _mlp(*[width] * 5, 10), _vectors(64, width))


def _tensors(name: str, count: int) -> Workload:
    return Workload(name, lambda: Fan(count), _vectors(8, 8, classes=8))


def _gradients(name: str, megabytes: int) -> Workload:
    """Little to compute, a large gradient, and no update: what is left is what reducing it takes."""
    width = round(math.sqrt(megabytes * 1e6 / 4))
    return Workload(name, lambda: nn.Linear(width, width, bias=False), _vectors(4, width, classes=width), update=False)


_FIXED: dict[str, Callable[[], Workload]] = {
    "tiny": lambda: Workload("tiny", lambda: nn.Linear(8, 8), _vectors(8, 8, classes=8)),
    "mlp": lambda: Workload("mlp", lambda: _mlp(64, *[256] * 7, 10), _vectors(256, 64)),
    "wide": lambda: Workload("wide", lambda: _mlp(1024, 4096, 4096, 10), _vectors(64, 1024)),
    "conv": lambda: Workload("conv", _conv, _vectors(64, 3, 32, 32)),
    "gpt": lambda: Workload("gpt", lambda: GPT(512), _tokens(32, 64, 512), _token_loss),
    "tied lm": lambda: Workload("tied lm", lambda: GPT(8000, tied=True), _tokens(16, 64, 8000), _token_loss),
}
_FAMILIES: dict[str, Callable[[str, int], Workload]] = {
    "parameters": _parameters,
    "tensors": _tensors,
    "gradients": _gradients,
}
