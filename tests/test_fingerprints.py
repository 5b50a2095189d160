"""A fingerprint of a tensor is another one whenever its bits are; what has the same is not sent again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenly import DataParallel
from evenly.team.fingerprints import fingerprint
from evenly.team.group import Gloo

NAN = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)


def written(position, value, size=3000, dtype=torch.float32):
    def write(x):
        x.view(-1)[position] = value

    return torch.arange(size).remainder(7).to(dtype), write


def swapped(one, other, dtype=torch.float32):
    def swap(x):
        flat = x.view(-1)
        flat[[one, other]] = flat[[other, one]].clone()

    return torch.arange(5000).remainder(1021).to(dtype), swap


def both(*changes):
    def change(x):
        for index, amount in changes:
            x.view(torch.int32)[index] += amount

    return torch.ones(5000), change


CHANGES = {
    "one element": written(1234, 3.5),
    "the last element": written(-1, 99.0),
    "zero to minus zero": written(0, -0.0),
    "one sign": written(1, -1.0),
    "all signs": (torch.arange(4.0).view(2, 2), torch.Tensor.neg_),
    "two signs": (torch.ones(9000, dtype=torch.float64), lambda x: x.view(3000, 3)[1000:2334:1333, 0].neg_()),
    "two neighbours": swapped(0, 1),
    "neighbours in two rows of a thousand": swapped(5, 1024),
    "far away ones": swapped(17, 4711),
    "bits that make up for each other": both((0, 1), (1, -1)),
    "bits whose weighted sum is zero": both((0, 1), (1, -2), (2, 1)),
    "the last bit of one in bfloat16": (torch.ones(999, dtype=torch.bfloat16), lambda x: x[5].add_(2**-7)),
    "a half precision swap": swapped(3, 4, torch.float16),
    "one of complex numbers": (torch.ones(7, dtype=torch.complex64), lambda x: x.imag[3].fill_(-0.0)),
    "a bool": (torch.zeros(100, dtype=torch.bool), lambda x: x[99].fill_(True)),
    "the payload of a NaN": (NAN.repeat(5), lambda x: x.view(torch.int32)[2].fill_(0x7FC00001)),
    "in another memory order": (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), lambda x: x[1, 2, 3, 4].add_(1)
    ),
    "a view with holes": (torch.randn(6, 6)[::2, ::3], lambda x: x[2, 1].add_(1e-6)),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_any_bit_is_seen(what):
    tensor, change = CHANGES[what]
    before = fingerprint(tensor)
    assert fingerprint(tensor) == before
    change(tensor)
    assert fingerprint(tensor) != before


def test_the_smallest_change_of_one_in_a_hundred_million():
    tensor = torch.zeros(100_000_000, dtype=torch.uint8)
    before = fingerprint(tensor)
    tensor[87_654_321] = 1
    assert fingerprint(tensor) != before


def test_what_lies_in_the_holes_of_a_tensor_does_not_count():
    whole = torch.zeros(6, 6)
    before = fingerprint(whole[::2])
    whole[1] = 5
    assert fingerprint(whole[::2]) == before


# ---------------------------------------------------------------------- what is sent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


@pytest.fixture
def sent(monkeypatch):
    """Bytes of each broadcast since the list was last cleared."""
    sizes = []
    usual = Gloo.start_broadcast

    def counted(self, group, flat):
        sizes.append(flat.numel())
        return usual(self, group, flat)

    monkeypatch.setattr(Gloo, "start_broadcast", counted)
    return sizes


def fused_step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def in_place(model):
    model.body.weight[1].mul_(2)


WRITES = {
    "through .data": (lambda model: model.body.weight.data.add_(1), ["body.weight"]),
    "by a fused optimizer": (fused_step, None),
    "in place": (in_place, ["body.weight"]),
    "to a view": (lambda model: model.head.weight.detach().view(-1)[3].fill_(7.0), ["head.weight"]),
    "through .data, to two": (
        lambda model: [p.data.neg_() for p in model.head.parameters()],
        ["head.weight", "head.bias"],
    ),
    "by load_state_dict": (
        lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
        None,
    ),
    "to a buffer": (lambda model: model.norm.running_mean.data.add_(1), []),
    "of the same values": (lambda model: model.body.weight.data.copy_(model.body.weight.data.clone()), []),
}  # fmt: skip


@pytest.mark.parametrize("how", WRITES)
def test_in_evaluation_what_was_written_is_sent_and_nothing_else(how, sent):
    write, names = WRITES[how]
    x = torch.randn(8, 3)
    module = Net().eval()
    model = DataParallel(module, device_ids=["cpu"] * 2, collectives="gloo")
    with torch.no_grad():
        model(x)
        model(x)  # the first one tells how outputs depend on the batch
        sent.clear()
        torch.testing.assert_close(model(x).full_tensor(), module(x))
        assert sent == []
        write(model)
        torch.testing.assert_close(model(x).full_tensor(), module(x))
        sizes = {name: 4 * p.numel() for name, p in module.named_parameters()}
        assert sum(sent) == sum(sizes[name] for name in (sizes if names is None else names))
        sent.clear()
        torch.testing.assert_close(model(x).full_tensor(), module(x))
        assert sent == []


def test_evaluation_after_training_sees_the_last_step(sent):
    x = torch.randn(8, 3)
    module = Net()
    model = DataParallel(module, device_ids=["cpu"] * 2, collectives="gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(x).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(x).full_tensor(), module(x))
    assert len([size for size in sent if size]) == 6  # one for each training forward, one for each first evaluation
