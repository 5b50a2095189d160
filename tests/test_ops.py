"""Every operation of PyTorch, on its own samples: it stays sharded and agrees, or gathers and agrees."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from evenly import rules
from evenly.team.team import Team
from opwalk import SKIPPED, Outcome, Variant, name_of, walk
from sharding import team_of

DOCUMENT = Path(__file__).parent.parent / "docs" / "ops.md"
ON_TWO = (
    Variant(4),
    Variant(4, all_aligned=True),
    Variant(2, dim=1),
    Variant(1, how="in_place"),
    Variant(1, how="out", backward=False),
)
ON_THREE = (Variant(1, dtype=torch.float32), Variant(1, all_aligned=True, dtype=torch.float32))

outcomes: dict[str, Outcome] = {}


@pytest.fixture(scope="module")
def two() -> Team:
    return team_of(2)


@pytest.fixture(scope="module")
def three() -> Team:
    return team_of(3)


@pytest.mark.parametrize("op", [op for op in op_db if name_of(op) not in SKIPPED], ids=name_of)
def test_it_agrees_with_plain_tensors(op, two, three):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = outcomes[name_of(op)] = walk(two, op, ON_TWO)
        third = walk(three, op, ON_THREE)
    assert not outcome.failures + third.failures, "\n".join(outcome.failures + third.failures)


def test_few_are_skipped():
    assert len(SKIPPED) < 0.03 * len(op_db)


def test_every_line_of_the_table_names_an_operation():
    for name in rules.TABLE:
        packet, _, overload = name.partition(".")
        found = getattr(torch.ops.aten, packet, None) or getattr(torch.ops.aten, f"{packet}_")
        assert not overload or overload in found.overloads(), name


def test_the_documentation_is_up_to_date():
    from opreport import report

    if len(outcomes) < len(op_db) - len(SKIPPED):
        pytest.skip("needs all of the tests above")
    text = DOCUMENT.read_text()
    if f"PyTorch {torch.__version__.partition('+')[0]}" not in text:
        pytest.skip("written for another release of PyTorch")
    assert text == report(outcomes), "run `python tests/opreport.py`"
