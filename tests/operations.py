"""What random programs do: templates of Python, with names of tensors and numbers to fill in.

``{a}`` and ``{b}`` are tensors, ``{d}`` is a dimension of ``{a}``, ``{e}`` one counted from the front, ``{i}`` and
``{j}`` are small numbers. What makes no sense for a tensor raises on the bare module, too, and is left out.
"""

from __future__ import annotations

ROW_WISE = [
    "h = self.linear(h)", "h = torch.tanh(h)", "h = h * self.scale", "h = h * h", "h = h.cumsum(-1)", "h = h.flip(-1)",
    "h = h + 1", "h = h.clone().mul_(2)", "h = self.linear(h).add_(1)", "h = h.detach()", "h = h.contiguous()",
    "h = h.mul_(2)",
]  # fmt: skip

_POINTWISE = """
{a} * 2
-{a}
{a} + 1
{a} / 3
{a}.tanh()
{a}.abs()
{a}.relu()
{a}.square()
{a}.sigmoid()
{a}.float()
{a}.double()
{a}.bfloat16()
{a}.to(torch.complex64)
{a}.long()
{a}.bool()
{a} > 0.1
~{a}
{a}.clone()
{a}.detach()
{a}.contiguous()
{a}.conj()
{a}.real
{a}.imag
{a}.resolve_conj()
{a}.isnan()
{a}.clamp(-1, 1)
torch.zeros_like({a})
torch.where({a} > 0.1, {a}, 0)
{a}.masked_fill({a} > 0.1, 2)
{a}.full_tensor() if isinstance({a}, evenly.ShardedTensor) else {a}.clone()
""".strip().splitlines()

_PAIRS = """
{a} + {b}
{a} - {b}
{a} * {b}
{a} == {b}
{a} & {b}
torch.maximum({a}, {b})
torch.where({a} > 0.1, {a}, {b})
{a} @ {b}
{a} @ {b}.mT
{a}.mT @ {b}
torch.cat([{a}, {b}], {d})
torch.cat([{a}, {b}])
torch.stack([{a}, {b}], {d})
F.mse_loss({a}, {b})
F.l1_loss({a}, {b}, reduction="none")
F.smooth_l1_loss({a}, {b}, reduction="sum")
{a}.expand_as({b})
torch.add({a}, {b}, alpha=2)
torch.addcmul({a}, {a}, {b})
torch.outer({a}.flatten(), {b}.flatten())
torch.linalg.vecdot({a}, {b})
{a}.view_as({b})
{a}.type_as({b})
{a}[{b} > 0.1]
{a}.masked_select({b} > 0.1)
torch.cdist({a}, {b})
F.cosine_similarity({a}, {b}, dim={d})
torch.equal({a}, {b})
{a} is {b}
""".strip().splitlines()

_VIEWS = """
{a}.T
{a}.mT
{a}.transpose({d}, {e})
{a}.movedim({d}, {e})
{a}[{i}:{j}]
{a}[{i}:]
{a}[:{i}]
{a}[{i}]
{a}[-1]
{a}[:, {i}]
{a}[..., {i}:]
{a}[..., :{i}]
{a}[::2]
{a}[1::3]
{a}[:, None]
{a}[None]
{a}.flatten()
{a}.flatten(0, 1)
{a}.view(-1)
{a}.view(-1, 2)
{a}.reshape(-1, {i})
{a}.reshape({i}, -1)
{a}.unsqueeze({d})
{a}.squeeze()
{a}.squeeze({d})
{a}.narrow({d}, 1, {i})
{a}.expand(2, *{a}.shape)
{a}.expand_as(torch.empty(2, *{a}.shape))
{a}.diagonal()
{a}.unbind({d})[-1]
{a}.chunk(2, {d})[-1]
{a}.split(2, {d})[0]
{a}.unfold({d}, 2, 1)
{a}.flip({d})
{a}.roll(1, {d})
{a}.roll(1)
{a}.repeat(2, 1)
{a}.repeat_interleave(2, {d})
{a}[torch.tensor([0, -1, 0])]
{a}[:, torch.tensor([0, -1])]
{a}.index_select({d}, torch.tensor([0]))
torch.view_as_real({a})
torch.view_as_complex({a})
{a}.view(torch.int64)
{a}.view(torch.int32)
{a}.data
{a}.unflatten({d}, (-1, 2))
{a}.tril()
""".strip().splitlines()

_REDUCTIONS = """
{a}.sum()
{a}.sum({d})
{a}.sum({d}, keepdim=True)
{a}.sum(dtype=torch.float64)
{a}.mean()
{a}.mean({d})
{a}.mean(({d}, {e}))
{a}.prod()
{a}.prod({d})
{a}.max()
{a}.min()
{a}.max({d}).values
{a}.amax({d})
{a}.amin({d}, keepdim=True)
{a}.all()
{a}.all({d})
{a}.any()
{a}.any({d})
{a}.cumsum({d})
{a}.cumprod({d})
{a}.std()
{a}.std({d})
{a}.var({d}, correction=0)
{a}.norm()
{a}.norm(dim={d})
{a}.norm(p=1, dim={d})
torch.linalg.vector_norm({a}, float("inf"))
{a}.logsumexp({d})
{a}.softmax({d})
{a}.log_softmax({d})
{a}.sort({d}).values
{a}.topk(1, {d}).values
{a}.median()
{a}.argmax()
{a}.argmin({d})
{a}.count_nonzero()
{a}.count_nonzero({d})
{a}.nansum({d})
{a}.aminmax(dim={d}).max
{a}.unique()
{a}.nonzero()
{a}.diff(dim={d})
{a}.quantile(0.5)
torch.cummax({a}, {d}).values
{a}.tolist()
{a}.sum().item()
len({a})
bool(({a} > 0.1).any())
[row.sum() for row in {a}]
{a}.size({d})
{a}.numel()
tuple({a}.shape)
""".strip().splitlines()

OPERATIONS = [*_POINTWISE, *_PAIRS, *_VIEWS, *_VIEWS, *_REDUCTIONS]

IN_PLACE = """
{a}.mul_(2)
{a}.add_({b})
{a}.copy_({b})
{a}.zero_()
{a}.fill_(2)
{a}.clamp_(min=0)
{a}.relu_()
{a}.neg_()
{a}[{i}:{j}].add_(1)
{a}[:{i}].mul_(3)
{a}[{i}].fill_(1)
{a}[:, {i}].mul_(3)
{a}[..., 0].add_(1)
{a}[::2].neg_()
{a}.__setitem__({a} > 0.1, 0)
{a}.__setitem__(slice({i}, {j}), 5)
{a}.__setitem__({i}, {b})
{a}.__setitem__(slice({i}, None), {b}[{i}:])
{a}.__setitem__(torch.tensor([0, -1]), 7)
{a}.__setitem__((slice(None), torch.tensor([0])), 7)
{a}.masked_fill_({b} > 0.1, 1)
{a}.view(-1).mul_(2)
{a}.view(-1)[::3].add_(1)
{a}.flatten()[{i}:].mul_(2)
{a}.T.add_(1)
{a}.t_()
{a}.unsqueeze_(0)
{a}.squeeze_()
{a}.transpose_(0, -1)
{a}.diagonal().fill_(3)
{a}.cumsum_({d})
{a}.index_fill_({d}, torch.tensor([0]), 4)
{a}.index_add_(0, torch.tensor([0]), {b}[:1])
{a}.scatter_({d}, {a}.argmax({d}, keepdim=True), 9)
{a}.detach().add_(1)
{a}.requires_grad_()
torch.add({a}, {a}, out={b})
{a}.set_({b})
{a}.squeeze(0).mul_(2)
{a}.unbind(0)[0].mul_(2)
{a}.chunk(2)[-1].mul_(2)
{a}.real.add_(1)
{a}.tril_()
{a}.swapaxes(0, 1).mul_(2)
torch.nn.utils.clip_grad_norm_([{a}], 1)
""".strip().splitlines()
"""Changes of a tensor, and of what shares its memory."""

LOSSES = [
    "{a}.sum()", "({a} * {a}).mean()", "{a}.square().sum()", "F.mse_loss({a}, torch.ones_like({a}))",
    "{a}.mean() + {a}.square().sum()", "({a} * {a}.detach()).sum(0).sum()", "{a}.sum() * {b}.abs().sum()",
    "({a} * torch.arange({a}.numel()).view({a}.shape)).sum()",
]  # fmt: skip
