"""Whole models train over replicas exactly as they do bare."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from parity import assert_same, training

DTYPES = (torch.float32, torch.float64)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.GELU())
        self.head = nn.Linear(8 * 3 * 3, 5)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Tagger(nn.Module):
    """Packs inside of forward, from lengths that come beside the batch."""

    def __init__(self, *, pad_to=None):
        super().__init__()
        self.pad_to = pad_to
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(14, 4)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        hidden, (last, _) = self.lstm(packed)
        padded, sizes = pad_packed_sequence(hidden, batch_first=True, total_length=self.pad_to or tokens.shape[1])
        return {"logits": self.head(padded), "last": last, "sizes": sizes}


class PackedLstm(nn.Module):
    """Takes a packed sequence and returns one."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, packed):
        hidden, state = self.lstm(packed)
        return PackedSequence(self.head(hidden.data), *hidden[1:]), state


class Gpt(nn.Module):
    """Two blocks of a GPT whose output layer is the embedding of its tokens."""

    def __init__(self, vocabulary=13, width=8, context=6):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without a bias: that of the keys has no gradient but noise, which Adam would divide by itself.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def make_mlp(dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def integers(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def token_loss(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


def tagger_loss(output, targets):
    return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten(), ignore_index=-1) + (
        output["last"].square().mean()
    )


def packed_loss(output, targets):
    packed, (hidden, cell) = output
    return F.mse_loss(packed.data, targets) + hidden.square().sum() + cell.abs().mean()


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_mlp_on_batches_of_any_size(rows, dtype):
    batch = (random(rows, 6, dtype=dtype),), random(rows, 4, seed=1, dtype=dtype)
    assert_same(functools.partial(make_mlp, dtype), training([batch], F.mse_loss))


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_conv_net(rows, dtype):
    batch = (random(rows, 1, 12, 12, dtype=dtype),), integers(5, rows)
    assert_same(lambda: ConvNet().to(dtype), training([batch], F.cross_entropy))


def test_a_conv_net_in_channels_last():
    batch = (random(5, 1, 12, 12).to(memory_format=torch.channels_last),), integers(5, 5)
    assert_same(lambda: ConvNet().to(memory_format=torch.channels_last), training([batch, batch], F.cross_entropy))


@pytest.mark.parametrize("as_list", [False, True], ids=["lengths as a tensor", "lengths as a list"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_lstm_that_packs_in_forward(as_list, dtype):
    batches = []
    for rows in (1, 2, 5, 9):
        lengths = integers(5, rows, seed=rows) + 1
        targets = integers(4, rows, 6).masked_fill(torch.arange(6) >= lengths[:, None], -1)
        batches.append(((integers(11, rows, 6), lengths.tolist() if as_list else lengths), targets))
    assert_same(lambda: Tagger().to(dtype), training(batches, tagger_loss))


def test_an_lstm_that_pads_to_the_longest_of_a_shard_says_what_to_do():
    class ToLongest(Tagger):
        def forward(self, tokens, lengths):
            packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    from parity import wrap

    model = wrap(ToLongest())
    with pytest.raises(ValueError, match=r"output has size 6 .*replica 0 and 2 .*total_length="):
        model(integers(11, 4, 6), torch.tensor([6, 6, 2, 2]))
    assert model(integers(11, 4, 6), torch.tensor([3, 6, 6, 2])).shape == (4, 6, 14)


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_lstm_on_a_packed_sequence(rows, dtype):
    lengths = integers(5, rows, seed=rows) + 1
    packed = pack_padded_sequence(random(6, rows, 3, dtype=dtype), lengths, enforce_sorted=False)
    targets = random(len(packed.data), 2, seed=1, dtype=dtype)
    assert_same(lambda: PackedLstm().to(dtype), training([((packed,), targets)], packed_loss))


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpt_with_tied_embeddings(rows, dtype):
    targets = integers(13, rows, 6, seed=1)
    targets[:, 4:] = -1
    assert_same(lambda: Gpt().to(dtype), training([((integers(13, rows, 6),), targets)], token_loss))


def test_a_shard_with_nothing_but_ignored_labels():
    targets = integers(13, 4, 6, seed=1)
    targets[2:] = -1
    assert_same(Gpt, training([((integers(13, 4, 6),), targets)], token_loss))


# ---------------------------------------------------------------------- after many steps

OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
}


def twenty_batches(dtype):
    sizes = [9, 8, 7, 1, 2, 5, 3] * 3
    return [
        ((random(rows, 6, seed=step, dtype=dtype),), random(rows, 4, seed=100 + step, dtype=dtype))
        for step, rows in enumerate(sizes[:20])
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twenty_steps(optimizer, dtype):
    loop = training(twenty_batches(dtype), F.mse_loss, OPTIMIZERS[optimizer])
    assert_same(functools.partial(make_mlp, dtype), loop)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps_of_a_gpt(optimizer):
    batches = [((integers(13, 5, 6, seed=step),), integers(13, 5, 6, seed=50 + step)) for step in range(20)]
    assert_same(lambda: Gpt().double(), training(batches, token_loss, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("optimizer", ["SGD with momentum", "AdamW"])
def test_weights_after_two_hundred_steps(optimizer):
    """Of a net with all that makes a step fast: small and large gradients, targets that come again, dropped ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (64,), generator=generator)

    def make():
        layers = [nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 5)]
        return nn.Sequential(*layers).double()

    def loop(model):
        stepper = OPTIMIZERS[optimizer](model.parameters())
        for step in range(200):
            rows = slice(step % 9 * 7, step % 9 * 7 + 5 + step % 3)
            stepper.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            stepper.step()

    # Rounding errors of two hundred steps add up, and Adam divides by gradients that have become small.
    assert_same(make, loop, tolerance=1e-8)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_twenty_steps_of_lbfgs_with_a_closure(line_search):
    x, y = random(7, 6, dtype=torch.float64), random(7, 4, seed=1, dtype=torch.float64)

    def loop(model):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=line_search)

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(20)]

    # Each step depends on differences of gradients that get smaller and smaller.
    assert_same(functools.partial(make_mlp, torch.float64), loop, tolerance=1e-8)
