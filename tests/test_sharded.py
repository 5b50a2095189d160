"""A sharded tensor is used like any other: every line here is a line that people write."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evenly.sharded import ShardedTensor, gathered, gathering
from evenly.team.team import Team
from sharding import shard, team_of, uneven


@pytest.fixture(scope="module", params=[2, 3])
def team(request) -> Team:
    return team_of(request.param)


@pytest.fixture(autouse=True)
def count_from_zero() -> None:
    gathered.clear()


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def check(team: Team, function: Callable[..., Any], *tensors: Tensor) -> None:
    """``function`` gives the same, or raises the same, of sharded tensors as of plain ones."""
    results: list[Any] = []
    for sharded in (False, True):
        given = [shard(team, t) if sharded else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        try:
            results.append(function(*given))
        except Exception as error:  # what it raises is compared
            results.append(error)
    same(*results)


def same(bare: Any, evenly: Any) -> None:
    if isinstance(bare, Exception) or isinstance(evenly, Exception):
        assert type(bare) is type(evenly), f"{evenly!r}, plain: {bare!r}"
    elif isinstance(bare, Tensor):
        assert isinstance(evenly, Tensor)
        assert (bare.shape, bare.dtype, bare.requires_grad) == (evenly.shape, evenly.dtype, evenly.requires_grad)
        found = evenly.full_tensor() if isinstance(evenly, ShardedTensor) else evenly
        torch.testing.assert_close(found.detach(), bare.detach(), equal_nan=True)
    elif isinstance(bare, (list, tuple)):
        assert type(bare) is type(evenly)
        assert len(bare) == len(evenly)
        for a, b in zip(bare, evenly, strict=True):
            same(a, b)
    elif isinstance(bare, dict):
        assert bare.keys() == evenly.keys()
        for key in bare:
            same(bare[key], evenly[key])
    elif isinstance(bare, np.ndarray):
        np.testing.assert_allclose(evenly, bare)
        assert bare.dtype == evenly.dtype
    elif isinstance(bare, float):
        assert evenly == pytest.approx(bare, rel=1e-12)
    else:
        assert bare == evenly


# ---------------------------------------------------------------------- looks


def test_it_is_a_tensor_with_the_geometry_of_the_whole(team):
    x = numbers(7, 3, 2)
    for plain in (x, x.transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1)):
        out = shard(team, plain)
        assert isinstance(out, Tensor)
        assert (out.shape, out.dtype, out.device, out.stride()) == (
            plain.shape,
            plain.dtype,
            plain.device,
            plain.stride(),
        )
        assert out.is_contiguous() == plain.is_contiguous()
        assert (len(out), out.dim(), out.numel(), out.size(0)) == (7, 3, 42, 7)


@pytest.mark.parametrize(
    "look",
    [
        repr,
        str,
        lambda x: f"{x}",
        lambda x: f"{x.sum():.3f}",
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        np.asarray,
        lambda x: np.array(x, dtype=np.float32),
        lambda x: np.mean(x.numpy(), axis=0),
        lambda x: float(x.mean()),
        lambda x: int(x.sum()),
        lambda x: bool((x > 100).any()),
        bool,
        len,
        list,
        lambda x: [row.sum() for row in x],
        lambda x: [a.tolist() for a in x.unbind(1)],
        lambda x: 3.0 in x,
        torch.from_dlpack,
        np.from_dlpack,
        torch.as_tensor,
        lambda x: torch.equal(x, x.clone()),
        lambda x: torch.allclose(x, x + 1e-12),
        lambda x: torch.testing.assert_close(x, x.clone()),
        torch.is_floating_point,
        lambda x: x.to(torch.float32),
        lambda x: x.float().half().double(),
        lambda x: x.cpu() is x,
        lambda x: x.cuda(),
        lambda x: x.type(torch.int64),
        lambda x: x.untyped_storage().nbytes(),
        lambda x: x.element_size() * x.nelement(),
        lambda x: x.is_leaf,
        lambda x: x.storage_offset(),
        lambda x: torch.tensor(x.tolist()),
        lambda x: x.view(torch.int64),
        lambda x: x.T.contiguous().is_contiguous(),
        lambda x: x.data,
        torch.func.vmap(lambda row: row.sum()),
        lambda x: torch.vmap(torch.dot)(x, x),
        torch.func.grad(lambda t: (t**2).sum()),
        lambda x: torch.func.jvp(lambda t: t**2, (x,), (torch.ones_like(x),)),
        lambda x: {x: 1}[x],
        lambda x: x == x,  # noqa: PLR0124
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: torch.nested.nested_tensor(list(x)).size(0),
        lambda x: x.to_sparse().to_dense(),
        lambda x: x.pin_memory() if torch.cuda.is_available() else None,
    ],
)
def test_it_looks_like_a_plain_tensor(team, look):
    check(team, look, numbers(5, 4))
    check(team, look, numbers(7, 2))


def test_its_print_shows_the_gradient_function(team):
    check(team, lambda x: repr(x * 2), numbers(5, 2).requires_grad_())
    check(team, repr, numbers(5, 2).requires_grad_())
    check(team, lambda x: x.numpy(), numbers(5, 2).requires_grad_())


@pytest.mark.parametrize("leaf", [True, False])
def test_it_is_saved_and_copied_as_a_plain_tensor(team, leaf):
    def through_save(x: Tensor) -> Tensor:
        buffer = io.BytesIO()
        torch.save({"out": x}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)["out"]
        assert type(loaded) is Tensor
        return loaded

    prepare = (lambda x: x) if leaf else (lambda x: x * 2)
    for function in (through_save, lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy):
        check(team, lambda x, function=function: function(prepare(x)), numbers(5, 2))
        check(team, lambda x, function=function: function(prepare(x)), numbers(5, 2).requires_grad_())
    check(team, lambda x: pickle.loads(pickle.dumps(x.sum())), numbers(5, 2))


def test_code_that_looks_for_memory_gets_an_error_not_a_crash(team):
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(shard(team, numbers(5, 2)))  # the old way, which asks nobody


def test_scikit_learn_scores_it(team):
    from sklearn import metrics

    target = torch.tensor([0, 1, 1, 0, 1, 0, 1])
    check(team, lambda x: float(metrics.accuracy_score(target, x.argmax(1))), numbers(7, 2))
    check(team, lambda x: float(metrics.roc_auc_score(target, x.softmax(1)[:, 1])), numbers(7, 2))
    check(team, lambda x: metrics.confusion_matrix(target, x.argmax(1)), numbers(7, 2))


# ---------------------------------------------------------------------- use


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x[0],
        lambda x, y: x[:3],
        lambda x, y: x[-1, 1:],
        lambda x, y: x[::2],
        lambda x, y: x[..., None],
        lambda x, y: x[None],
        lambda x, y: x[:, 0],
        lambda x, y: x[x > 0],
        lambda x, y: x[y[:, 0] > 0],
        lambda x, y: x[torch.arange(len(x)), 1],
        lambda x, y: x[[0, 2]],
        lambda x, y: x.T @ x,
        lambda x, y: x @ y.T,
        lambda x, y: x.sort(0),
        lambda x, y: x.sort(1),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.cat([x, y], 1),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: torch.stack([x, y], -1),
        lambda x, y: torch.cat([x, torch.zeros(0, 3, dtype=x.dtype)]),
        lambda x, y: torch.where(x > y, x, 0.0),
        torch.cdist,
        F.cosine_similarity,
        F.pairwise_distance,
        lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)),
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(len(x))),
        lambda x, y: F.cross_entropy(x @ y.T / 0.1, torch.arange(len(x))),
        lambda x, y: x.std(),
        lambda x, y: (x - x.mean(0)) / x.std(0),
        lambda x, y: torch.cov(x.T),
        lambda x, y: x.norm(),
        lambda x, y: x.norm(dim=0),
        lambda x, y: x.norm(dim=1, keepdim=True),
        lambda x, y: torch.linalg.vector_norm(x, 3.0),
        lambda x, y: x.max(0),
        lambda x, y: x.max(1),
        lambda x, y: x.max(),
        lambda x, y: x.prod(0),
        lambda x, y: x.logsumexp(0),
        lambda x, y: x.softmax(0),
        lambda x, y: torch.einsum("nd,md->nm", x, y),
        lambda x, y: x.view(-1),
        lambda x, y: x.reshape(-1, 1),
        lambda x, y: x.expand(2, -1, -1).flatten(0, 1),
        lambda x, y: x.repeat(2, 1),
        lambda x, y: x.roll(1, 0),
        lambda x, y: torch.split(x, 2),
        lambda x, y: torch.chunk(x, 2, 1),
        lambda x, y: x.unfold(0, 2, 1),
        lambda x, y: torch.linalg.svdvals(x),
        lambda x, y: x.index_select(0, torch.tensor([1, 0])),
        lambda x, y: x.gather(1, torch.zeros(len(x), 1, dtype=torch.int64)),
        lambda x, y: x.masked_select(x > 0),
        lambda x, y: x + 1j * y,
        lambda x, y: torch.complex(x, y).conj().imag,
        lambda x, y: torch.nn.utils.rnn.pad_sequence(list(x)),
        lambda x, y: torch.addmm(torch.ones(3, dtype=x.dtype), x, torch.ones(3, 3, dtype=x.dtype)),
        lambda x, y: x.float().bfloat16().float().mean().double(),
        lambda x, y: torch.utils.checkpoint.checkpoint(lambda t: (t * y).sin(), x, use_reentrant=False),
        lambda x, y: x.sum(0) + y.sum(0),
        lambda x, y: (x.sum() + y.sum()) / 2 - 3 * x.mean(),
    ],
)
def test_what_people_do_with_outputs_gives_values_and_gradients_of_the_whole(team, use):
    def with_gradients(x: Tensor, y: Tensor) -> Any:
        result = use(x, y)
        first = result if isinstance(result, Tensor) else result[0]
        loss = (first * torch.linspace(1, 2, first.numel(), dtype=torch.float64).view(first.shape)).sum().abs()
        return result, torch.autograd.grad(loss, [x, y], allow_unused=True, materialize_grads=True)

    x, y = numbers(7, 3).requires_grad_(), numbers(7, 3, seed=1).requires_grad_()
    check(team, with_gradients, x, y)
    check(team, lambda x: with_gradients(x, y.detach().clone().requires_grad_()), x)
    check(team, lambda y: with_gradients(x.detach().clone().requires_grad_(), y), y)


def _write(statement: str) -> Callable[[Tensor], Any]:
    def run(x: Tensor) -> Any:
        scope: dict[str, Any] = {"x": x, "torch": torch, "mask": torch.arange(len(x)) % 2 == 0}
        scope["before"] = x + 0
        exec(statement, scope)
        return [x, *(value for name, value in sorted(scope.items()) if name in "abcdef")]

    return run


WRITES = [
    "x[2] = 0",
    "x[:3] = 1",
    "x[:, 1] += 1",
    "x[:, 1] = 5",
    "x[mask] = 0",
    "x[x > 0] = 0",
    "x[x > 0] *= 2",
    "x[mask, 1] = 7",
    "x[mask] = before[mask] * 2",
    "x += 1",
    "x *= x",
    "x.clamp_(min=0)",
    "x.masked_fill_(x < 0, 9)",
    "x.masked_fill_(mask[:, None], 9)",
    "x.zero_()",
    "x.copy_(before * 3)",
    "x.fill_(2)",
    "x.t().add_(1)",
    "x.view(-1)[3] = 4",
    "x.view(-1).add_(2)",
    "x[:, :2][:, 0].mul_(3)",
    "x[:3][:, 1].mul_(3)",
    "x.t()[0].t().add_(1)",
    "a = x[0]; x += 1",
    "a = x[0]; a += 1",
    "a = x[:3]; b = a[0]; b.zero_(); x *= 2",
    "a = x[:, 0]; x[1] = 3",
    "a = x[:, 0]; b = x[1]; x.add_(1); b.add_(1); a.mul_(2)",
    "a = x.detach(); a.add_(1)",
    "a = x.data; a.add_(1)",
    "a = x.detach(); x[0] = 3",
    "a = x.view(-1); b = x[2:]; a.sub_(1); b.sub_(1)",
    "a = x.unsqueeze(0); a.squeeze_(0); a += 1",
    "x.unsqueeze_(1)",
    "x.t_()",
    "x.transpose_(0, 1)",
    "a = list(x); a[1].add_(5); x.mul_(2)",
    "a, b = x.chunk(2); b.fill_(3)",
    "x.index_add_(1, torch.tensor([0]), before[:, :1])",
    "x.index_fill_(1, torch.tensor([0]), 3.0)",
    "x.scatter_(1, torch.zeros(len(x), 1, dtype=torch.int64), 4.0)",
    "x.addcmul_(before, before)",
    "x.lerp_(before * 2, 0.5)",
    "x.sub_(x.mean())",
    "x.div_(x.norm(dim=1, keepdim=True))",
    "x.requires_grad_(); b = (x * 2).detach_()",
    "torch.manual_seed(0); x.normal_()",
    "torch.manual_seed(0); a = x[1]; x.uniform_()",
    "torch.manual_seed(0); a = torch.nn.functional.dropout(x, 0.5)",
    "torch.manual_seed(0); a = torch.rand_like(x); b = torch.bernoulli(a)",
    "x.resize_(2, 2)",
    "x.set_(torch.ones(2, 2, dtype=x.dtype))",
    "x.data = torch.ones(7, 3, dtype=x.dtype)",
    "a = x.detach(); x.data = torch.ones(7, 3, dtype=x.dtype); a += 1",
    "x.data = torch.ones(2, dtype=x.dtype)",
    "a = x.numpy(); a[0] = 1; x[1] = 2",
    "x.numpy()[0] = 1",
    "x[0] = torch.nan; a = x.isnan()",
    "torch.add(x, 1, out=x)",
    "a = torch.zeros(7, 3, dtype=x.dtype); torch.mul(x, 2, out=a)",
    "a = x + 0; torch.mul(before, 2, out=a)",
    "a = torch.zeros(3, 7, dtype=x.dtype); a[:] = x.t(); a += x.t()",
    "a = torch.zeros(7, 3, dtype=x.dtype); a.copy_(x); x += 1",
    "a = x.conj(); x += 1",
    "x.fill_diagonal_(3)",
    "x.masked_scatter_(x > 0, torch.zeros(21, dtype=x.dtype))",
    "a = x.sum(); a += 1; a /= 2; b = a * 3; a.zero_()",
    "a = x.sum(); b = a.detach(); a += 1",
    "a = x.mean(); b = a.view(1); b += 1",
    "a = x.clone(); a.swapaxes_(0, 1)",
    "torch._foreach_add_([x, x[0]], 1.0)",
    "torch._foreach_mul_([x], 2.0)",
]


@pytest.mark.parametrize("statement", WRITES)
def test_writing_is_seen_by_all_that_share_the_memory(team, statement):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(team, _write(statement), numbers(7, 3))


@pytest.mark.parametrize(
    "statement",
    [
        "y[2] = 0",
        "y[:, 1] += 1",
        "y[mask] = 0",
        "y[:3][:, 1].mul_(3)",
        "y.mul_(2)",
        "y.relu_()",
        "y.view(-1)[::2] *= 2",
        "y[0].exp_()",
    ],
)
def test_gradients_flow_through_writes(team, statement):
    def run(x: Tensor) -> Any:
        y = x * 2
        exec(statement, {"y": y, "mask": torch.arange(len(x)) % 2 == 0})
        (y**2).sum().backward()
        return y, x.grad

    check(team, run, numbers(7, 3).requires_grad_())


def test_a_write_that_spoils_a_gradient_is_refused_as_for_plain_tensors(team):
    def spoiled(x: Tensor) -> None:
        y = x.exp()
        y.add_(1)
        y.sum().backward()

    def leaf(x: Tensor) -> None:
        x.add_(1)

    def spoiled_by_a_view(x: Tensor) -> None:
        y = x.exp()
        y[:, 0].add_(1)
        y.sum().backward()

    for function in (spoiled, leaf, spoiled_by_a_view):
        check(team, function, numbers(5, 2).requires_grad_())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + torch.ones(4),
        lambda x: x.view(4, 4),
        lambda x: x @ x,
        lambda x: x.sum(5),
        lambda x: x.softmax(3),
        lambda x: x[9],
        lambda x: x[:, 9],
        lambda x: x.squeeze(7),
        lambda x: F.cross_entropy(x, torch.tensor([0])),
        lambda x: F.mse_loss(x, torch.ones(2, 9)),
        lambda x: x.add_(torch.ones(2, 5, 2)),
        lambda x: x.index_select(1, torch.tensor([9])),
        lambda x: x.to("nowhere"),
        lambda x: torch.cat([x, x[0]]),
        lambda x: x.expand(3, 3),
        lambda x: x.permute(0, 0),
        lambda x: x.bitwise_and(1),
        lambda x: x.backward(),
        lambda x: x.gather(1, torch.full((5, 1), 9)),
    ],
)
def test_what_a_plain_tensor_refuses_is_refused_and_nothing_stays_behind(team, wrong):
    check(team, wrong, numbers(5, 2))
    check(team, lambda x: (x * 2).sum(), numbers(5, 2))  # the replicas' own failure is not left for the next to find


def test_a_failure_in_one_replica_arrives_when_somebody_looks(team):
    out, target = shard(team, numbers(7, 3)), torch.tensor([0, 1, 2, 0, 1, 2, 99])
    with pytest.raises(IndexError, match="99"):
        F.cross_entropy(out, target).item()
    check(team, lambda x: (x * 2).sum(), numbers(5, 2))


# ---------------------------------------------------------------------- autograd


def test_hooks_and_retained_gradients(team):
    def run(x: Tensor) -> Any:
        seen: list[Any] = []
        y = x * 3
        y.retain_grad()
        y.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        y.register_hook(lambda gradient: gradient * 2)
        (y**2).mean().backward(retain_graph=True)
        (y**2).mean().backward()
        return seen, y.grad, x.grad

    check(team, run, numbers(5, 2).requires_grad_())


def test_double_backward(team):
    def penalty(x: Tensor) -> Any:
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        loss = (gradient.norm(2, dim=1) - 1).pow(2).mean()
        return gradient, loss, torch.autograd.grad(loss, x)

    check(team, penalty, numbers(5, 3).requires_grad_())


def test_a_head_outside_of_the_model_gets_plain_exact_gradients(team):
    head = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3, bias=False)
    ).double()

    def run(x: Tensor) -> Any:
        head.zero_grad()
        loss = F.cross_entropy(head(x), torch.arange(7) % 3, label_smoothing=0.1)
        loss.backward()
        assert all(type(parameter.grad) is Tensor for parameter in head.parameters())
        return loss, x.grad, [parameter.grad.clone() for parameter in head.parameters()]

    check(team, run, numbers(7, 6).requires_grad_())
    assert not gathered


def test_a_convolutional_head_keeps_its_input_sharded(team):
    head = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Upsample(scale_factor=2), torch.nn.Conv2d(4, 1, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
    ).double()  # fmt: skip

    def run(x: Tensor) -> Any:
        head.zero_grad()
        loss = head(x).square().mean()
        loss.backward()
        return loss, x.grad, [parameter.grad.clone() for parameter in head.parameters()]

    check(team, run, numbers(5, 2, 6, 6).requires_grad_())
    assert not gathered


def test_a_learned_temperature_gets_a_plain_gradient(team):
    scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def run(x: Tensor) -> Any:
        scale.grad = None
        F.cross_entropy(x * scale.exp(), torch.arange(7) % 3).backward()
        assert type(scale.grad) is Tensor
        return scale.grad

    check(team, run, numbers(7, 3))


def test_losses_over_two_sharded_tensors_and_plain_ones_both_ways(team):
    plain = numbers(7, 3, seed=2)
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.poisson_nll_loss):
        for reduction in ("mean", "sum", "none"):

            def run(x: Tensor, y: Tensor, loss=loss, reduction=reduction) -> Any:
                value = loss(x, y, reduction=reduction) + loss(plain, x, reduction=reduction)
                return value, torch.autograd.grad(value.sum(), [x, y])

            check(team, run, numbers(7, 3).requires_grad_(), numbers(7, 3, seed=1).requires_grad_())
    assert not gathered


def test_inference_mode_keeps_rows_where_they_are(team):
    with torch.inference_mode():
        for function in (
            lambda x: F.cross_entropy(x, torch.arange(7) % 3),
            lambda x: F.linear(x, torch.ones(2, 3, dtype=x.dtype)).reshape(-1, 2, 1).flatten(0, 1),
            lambda x: (x.softmax(-1).argmax(-1) == 1).float().mean(),
            lambda x: F.layer_norm(x, (3,)).matmul(torch.ones(3, 1, dtype=x.dtype)),
        ):
            check(team, function, numbers(7, 3))
    assert not gathered


def test_a_compiled_loss(team):
    compiled = torch.compile(lambda x, y: F.cross_entropy(x.tanh(), y), backend="aot_eager")
    target = torch.arange(7) % 3

    def run(x: Tensor) -> Any:
        loss = compiled(x, target)
        return loss, torch.autograd.grad(loss, x)

    check(team, run, numbers(7, 3).requires_grad_())


# ---------------------------------------------------------------------- numbers that are not known yet


def test_arithmetic_with_losses_does_not_wait_for_the_replicas(team, monkeypatch):
    from evenly.team import values

    waits: list[int] = []
    fetch = values.fetch
    monkeypatch.setattr(values, "fetch", lambda *args, **kwargs: waits.append(1) or fetch(*args, **kwargs))
    x = numbers(7, 3)
    out = shard(team, x)
    total: Any = 0.0
    for step in range(5):
        loss = F.mse_loss(out, x * 2) + 0.1 * F.l1_loss(out, x * 3) * torch.tensor(0.5)
        total += (loss / 4).detach()
        assert not waits, step
    expected = 5 * (F.mse_loss(x, x * 2) + 0.05 * F.l1_loss(x, x * 3)) / 4
    torch.testing.assert_close(total.full_tensor(), expected)
    assert waits


def test_a_running_sum_does_not_grow(team):
    out = shard(team, numbers(7, 3))
    total = out.sum() * 0
    for _ in range(300):
        total = total + out.sum()
    torch.testing.assert_close(total.item(), 300 * numbers(7, 3).sum().item())


# ---------------------------------------------------------------------- memory


def test_cross_entropy_over_a_large_vocabulary_never_gathers_the_logits(team):
    vocabulary = 50_000
    x, target = numbers(5, vocabulary, dtype=torch.float32), torch.tensor([3, -100, -100, 7, 49_999])

    def run(x: Tensor) -> Any:
        losses = []
        for _ in range(3):
            logits = x * 1.0
            loss = F.cross_entropy(logits, target, reduction="mean")
            loss.backward()
            losses.append(loss.item())
            losses.append((logits.argmax(-1) == target).sum().item())
        return losses, x.grad

    out = shard(team, x, requires_grad=True)
    losses, gradient = run(out)
    assert isinstance(gradient, ShardedTensor)
    assert gradient.shards is not None
    assert not gathered
    same(run(x.requires_grad_()), (losses, gradient))


def test_looking_at_rows_leaves_the_rest_where_it_is(team):
    out = shard(team, numbers(7, 3))
    first, some, rows = out[0], out[1:5], list(out)
    assert out.shards is not None
    same([numbers(7, 3)[0], numbers(7, 3)[1:5], *numbers(7, 3)], [first, some, *rows])
    gathered.clear()
    assert out[0].sum().item() == pytest.approx(numbers(7, 3)[0].sum().item())
    assert not gathered  # the driver's own rows
    out += 1
    assert out.shards is not None
    same([numbers(7, 3)[0] + 1, numbers(7, 3)[1:5] + 1], [first, some])
    some[0] = 5
    same(out[1], torch.full((3,), 5.0, dtype=torch.float64))


def test_large_gathers_are_named_once(team, monkeypatch):
    monkeypatch.setattr(gathering, "_warned", set())
    out = shard(team, numbers(6, 100_000, dtype=torch.float32))
    with pytest.warns(UserWarning, match=r"aten::sort works on whole tensors: 2\.3 MiB were gathered"):
        out.sort(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out.sort(0)
    assert gathered["aten::sort"] == 2


def test_plain_operands_are_looked_at_again_every_time(team):
    x, target = numbers(7, 3), numbers(7, 3, seed=1)
    out = shard(team, x)
    for write in (
        lambda: target.data.add_(1),
        lambda: target.numpy().__setitem__(0, 5.0),
        lambda: target.detach().mul_(2),
        lambda: target.set_(numbers(7, 3, seed=9)),
    ):
        torch.testing.assert_close(F.mse_loss(out, target).item(), F.mse_loss(x, target).item())
        write()
        torch.testing.assert_close(F.mse_loss(out, target).item(), F.mse_loss(x, target).item())
    with torch.inference_mode():
        frozen = numbers(7, 3, seed=4)
        for _ in range(3):
            torch.testing.assert_close((out * frozen).sum().item(), (x * frozen).sum().item())
            frozen += 1


def test_a_target_that_lives_on_does_not_keep_the_replicas(team):
    target = numbers(7, 3, seed=1)
    others = team_of(team.size + 2)
    (shard(others, numbers(7, 3)) * target).sum().item()
    gone = weakref.ref(others)
    del others
    gc.collect()
    assert gone() is None


def test_settings_that_look_alike_are_kept_apart(team):
    def run(x: Tensor) -> Any:
        return [
            x.copysign(0.0), x.copysign(-0.0), x.pow(1), x.pow(1.0), x * True, x * 1, x.clamp(max=float("nan")),
            x.int() * 1, x.int() * 1.0, x.int() * True,
        ]  # fmt: skip

    check(team, run, numbers(7, 3))


def test_rows_stay_uneven(team):
    rows = {2: (6, 1), 3: (1, 4, 2)}[team.size]
    x = numbers(7, 3)
    out = shard(team, x, rows=rows)
    assert uneven(7, team.size) != rows
    torch.testing.assert_close((out.softmax(1) * out).mean().item(), (x.softmax(1) * x).mean().item())
    other = shard(team, x)
    same(x + x, out + other)
