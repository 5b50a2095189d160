"""The promise for programs that nobody thought of: whatever is done with a model's output, bare == evenly.

`EVENLY_EXAMPLES=5000` tries that many new programs; without, the same few are tried every time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from torch import nn

import parity
from evenly.rules.plan import COMBINE
from programs import Program, programs

EXAMPLES = int(os.environ.get("EVENLY_EXAMPLES", "0"))


def _wrap(module: nn.Module, device_ids: list[str], **options: Any) -> nn.Module:
    return parity.wrap(module, len(device_ids), **options)


@pytest.mark.timeout(0 if EXAMPLES else 120)
@pytest.mark.filterwarnings("ignore")  # what PyTorch says of casts and empty reductions
@settings(
    deadline=None,
    max_examples=EXAMPLES or 100,
    derandomize=not EXAMPLES,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    # What fails is made smaller when somebody hunts for it; elsewhere it is said soon.
    phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
)
@given(programs())
def test_any_program_sees_the_same_over_replicas(program: Program) -> None:
    try:
        program.run(wrap=_wrap)
    except Exception:
        note(f"A script that reproduces it:\n{program.script()}")
        raise


SUM_OVER_ROWS = Program(
    text="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x)


def program(model, replicate, samples):
    out = model(values((5, 3), 1))
    total = out.sum(0)
    return dict(out=out, total=total)
""",
    options='device_ids=["cpu"] * 2',
    tolerance=1e-9,
)
WRONG_SUM = 'from evenly.rules.plan import COMBINE\n\nCOMBINE["sum"] = lambda parts: parts[0]\n'


def test_a_wrong_sum_fails_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    SUM_OVER_ROWS.run(wrap=_wrap)
    monkeypatch.setitem(COMBINE, "sum", lambda parts: parts[0])
    with pytest.raises(AssertionError, match=r"total \(shape \[3\]\)"):
        SUM_OVER_ROWS.run(wrap=_wrap)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_printed_of_a_program_reproduces_its_failure(tmp_path: Path, wrong: bool) -> None:
    script = SUM_OVER_ROWS.script()
    place = script.index("import dataclasses")
    file = tmp_path / "program.py"
    file.write_text(script[:place] + WRONG_SUM * wrong + script[place:], encoding="utf-8")
    found = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert (found.returncode != 0) == wrong, found.stderr
    assert ("evenly != bare\ntotal (shape [3])" in found.stderr) == wrong


# ---------------------------------------------------------------------- what such programs have found


class Returning(nn.Module):
    """Returns what it is told to."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(self.linear(x), x)


def batch() -> torch.Tensor:
    return torch.arange(21, dtype=torch.float64).reshape(7, 3) / 4


def test_a_tensor_that_is_returned_twice_is_one_tensor() -> None:
    def loop(model: nn.Module) -> Any:
        first, second = model(batch())
        first[2:5].mul_(3)
        assert first is second
        (second * second).sum().backward()
        return second

    parity.assert_same(lambda: Returning(lambda h, x: (h, h)), loop)


def test_an_argument_that_is_returned_is_the_users_own() -> None:
    def loop(model: nn.Module) -> Any:
        x = batch().requires_grad_()
        out, same = model(x)
        assert same is x
        (out * same).sum().backward()
        return x.grad

    parity.assert_same(lambda: Returning(lambda h, x: (h, x)), loop)


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, 1:], lambda x: x.flatten(), lambda x: x[None]])
def test_a_view_of_an_argument_sees_what_is_written_to_it(view: Any) -> None:
    def loop(model: nn.Module) -> Any:
        x = batch()
        _, part = model(x)
        x.mul_(2)
        part.add_(1)
        return x, part

    parity.assert_same(lambda: Returning(lambda h, x: (h, view(x))), loop)


def test_writing_to_an_output_that_shares_memory_with_another_is_refused() -> None:
    model = parity.wrap(Returning(lambda h, x: (h, h.flatten())))
    first, flat = model(batch())
    expected = flat.tolist()
    for change in (lambda: first.mul_(2), lambda: first[2:5].add_(1), lambda: first.cumsum_(0)):
        with pytest.raises(RuntimeError, match=r"output\[\d\].*clone"):
            change()
    assert flat.tolist() == first.flatten().tolist() == expected


def test_a_plain_leaf_has_a_plain_gradient() -> None:
    def loop(model: nn.Module) -> Any:
        weights = batch().requires_grad_()
        for _ in range(2):
            (model(batch()) * weights).exp().sum().backward()
            assert type(weights.grad) is torch.Tensor
        return weights.grad

    parity.assert_same(lambda: nn.Linear(3, 3).double(), loop)


def test_forward_may_change_what_the_caller_has_computed() -> None:
    def loop(model: nn.Module) -> Any:
        leaf = (batch() - 2).requires_grad_()
        x = leaf * 2
        model(x).square().sum().backward()
        return leaf.grad, x.detach()

    parity.assert_same(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3).double()), loop)


def test_what_forward_has_changed_has_no_gradient_of_its_own() -> None:
    model = parity.wrap(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3).double()))
    leaf = batch().requires_grad_()
    x = leaf * 2
    out = model(x)
    with pytest.raises(RuntimeError, match=r"args\[0\] was changed in place by forward"):
        (out.sum() + x.sum()).backward()


def test_an_argument_changed_by_forward_may_be_used_there_afterwards() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.mul_(2))  # keeps x for its gradient

    def loop(model: nn.Module) -> Any:
        x = batch()
        model(x).square().sum().backward()
        return x

    parity.assert_same(Doubling, loop)


def test_outputs_of_inference_mode_can_be_written_to_in_it() -> None:
    def loop(model: nn.Module) -> Any:
        with torch.inference_mode():
            out = model(batch())
            out.T.mul_(2)
            out[:, 1].add_(1)
            return out

    parity.assert_same(lambda: nn.Linear(3, 3).double(), loop)


def test_parameters_stay_trainable_after_a_first_call_in_inference_mode() -> None:
    def loop(model: nn.Module) -> Any:
        with torch.inference_mode():
            model(batch())
        weight = next(model.parameters())
        assert not weight.is_inference()
        (model(batch()).sum() + (weight * weight).sum()).backward()
        return weight

    parity.assert_same(lambda: nn.Linear(3, 3).double(), loop)


def test_an_argument_that_forward_copies_by_its_layout_is_not_changed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.contiguous().mul_(2))  # a single row of such a batch is contiguous already

    def loop(model: nn.Module) -> Any:
        x = batch()[:3].T
        model(x)
        return x

    parity.assert_same(Model, loop, replicas=(2, 3))


def test_an_expanded_output_cannot_be_changed() -> None:
    model = parity.wrap(Returning(lambda h, x: h[:, None].expand(-1, 2, -1)))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="expanded"):
            model(batch())[:, 1].mul_(3)


def test_a_batch_as_large_as_a_probe_may_be_changed_in_place() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    parity.assert_same(Doubling, lambda model: model(batch()[:5]))


def test_gradients_of_gradients_do_not_flow_through_what_an_input_has_become() -> None:
    model = parity.wrap(Returning(lambda h, x: h * h))
    leaf = batch().requires_grad_()
    x = leaf * 2
    out = model(x)
    x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaf, create_graph=True)


def test_a_number_that_is_written_to_through_another_name_changes() -> None:
    def loop(model: nn.Module) -> Any:
        loss, total = model(batch())
        loss.detach().add_(1)
        other = total.sum().detach()
        again = other.detach()
        again.mul_(2)
        return loss, other, again, total.sum()

    parity.assert_same(lambda: Returning(lambda h, x: (h.mean(), h)), loop)


def test_gradients_that_are_yet_to_be_conjugated_add_up() -> None:
    def loop(model: nn.Module) -> Any:
        out = torch.view_as_real(model(batch().to(torch.complex128)))
        first = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
        sum(gradient.abs().square().sum() for gradient in first).backward()

    parity.assert_same(lambda: nn.Linear(3, 3, dtype=torch.complex128), loop)


def test_a_change_behind_the_back_of_autograd_happens_to_all_rows() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.detach().mul_(2)
            return self.linear(x)

    def loop(model: nn.Module) -> Any:
        x = batch().requires_grad_()
        model(x).sum().backward()
        return x, x.grad

    parity.assert_same(Model, loop)


def test_a_view_of_an_argument_with_a_gradient_is_one_to_autograd() -> None:
    def loop(model: nn.Module) -> Any:
        leaf = batch().requires_grad_()
        x = leaf * 2
        _, part = model(x)
        part.mul_(3)
        x.square().sum().backward()
        return leaf.grad, x, part

    parity.assert_same(lambda: Returning(lambda h, x: (h, x[:, 1:].T)), loop)


def test_a_function_that_returns_its_argument_keeps_its_own_gradient() -> None:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return -gradient

    def loop(model: nn.Module) -> Any:
        leaf = batch().requires_grad_()
        for x in (leaf, leaf * 2):
            out, part = model(x)
            ((part * part).sum() + out.sum()).backward()
        return leaf.grad

    parity.assert_same(lambda: Returning(lambda h, x: (h, Reversed.apply(x)[:, :2])), loop)


def test_whether_outputs_share_memory_does_not_depend_on_how_many_rows_a_replica_has() -> None:
    def loop(model: nn.Module) -> Any:
        with torch.no_grad():
            first, second = model(batch()[:3].T)
            first.mul_(2)
            return first, second

    # A single row of this layout is contiguous, more are not, and are copied.
    parity.assert_same(
        lambda: Returning(lambda h, x: ((y := x * 2).flatten(), y.flatten())), loop, split=[2, 1], replicas=(2,)
    )


def test_zeros_that_have_no_memory_travel() -> None:
    def loop(model: nn.Module) -> Any:
        leaf = batch().requires_grad_()
        loss = model(leaf).abs().sum()  # the second derivative of `abs` is such a zero
        first = torch.autograd.grad(loss, [leaf, *model.parameters()], create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        return leaf.grad

    parity.assert_same(lambda: nn.Linear(3, 3).double(), loop)


def test_an_expanded_output_is_one_with_a_single_row_for_each_replica_too() -> None:
    model = parity.wrap(Returning(lambda h, x: h[:, None].expand(-1, 2, -1)))
    out = model(batch()[:2]).detach()
    assert out.stride(1) == 0
    with pytest.raises(RuntimeError, match="expanded"):
        out.diagonal().fill_(3)
