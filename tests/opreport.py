"""Writes docs/ops.md: what becomes of every operation of PyTorch. Run it with ``--full`` to try all samples."""

from __future__ import annotations

import argparse
import sys
import textwrap
import warnings
from pathlib import Path

import torch
from torch.testing._internal.common_methods_invocations import op_db

from opwalk import SKIPPED, Outcome, Variant, name_of, walk
from sharding import team_of

HEADER = """\
# What operations do to a sharded tensor

Written by `python tests/opreport.py`, from PyTorch's own samples of its operations (PyTorch {version}); a test checks
that it is up to date. Each sample runs with its first tensor dealt out unevenly over replicas along the first
dimension, and with all that are as long; values, shapes, dtypes, strides, gradients and errors are those of plain
tensors.

| operations | |
|---|---|
| in PyTorch's list | {total} |
| tried | {tried} |
| … stay sharded, or become a partial sum | {kept} |
| … stay sharded for some arguments, are gathered for others | {mixed} |
| … are gathered | {gathered} |
| take no tensor with rows | {rowless} |
| skipped | {skipped} |

A *partial sum* is a number, or a tensor, of which every replica holds a part; it is added up when somebody looks.
*Gathered* means: done on the driver, on the whole tensor, as PyTorch does it; the result is an ordinary tensor.
"""

SECTIONS = (
    ("sharded", "Stay sharded"),
    ("partial", "Stay sharded, or become a partial sum"),
    ("mixed", "Stay sharded where that can be"),
    ("gathered", "Gathered"),
    ("rowless", "Take no tensor with rows"),
)
NOTES = {
    "mixed": "They are gathered where the rows themselves are sorted, selected, padded, merged with what is in front "
    "of them …, or where tensors do not fit row by row.",
}


def kind(outcome: Outcome) -> str:
    """The section of an operation."""
    if not outcome.tried:
        return "rowless"
    if not outcome.sharded + outcome.parts:
        return "gathered"
    if outcome.gathered or outcome.whole:
        return "mixed"
    return "partial" if outcome.parts else "sharded"


def report(outcomes: dict[str, Outcome]) -> str:
    """The document."""
    sections: dict[str, list[str]] = {name: [] for name, _ in SECTIONS}
    for name, outcome in sorted(outcomes.items()):
        sections[kind(outcome)].append(name)
    counts = {name: len(found) for name, found in sections.items()}
    text = HEADER.format(
        version=torch.__version__.partition("+")[0],
        total=len(op_db),
        tried=len(outcomes) - counts["rowless"],
        kept=counts["sharded"] + counts["partial"],
        mixed=counts["mixed"],
        gathered=counts["gathered"],
        rowless=counts["rowless"],
        skipped=len(SKIPPED),
    )
    for name, title in SECTIONS:
        text += f"\n## {title}\n\n"
        if name in NOTES:
            text += textwrap.fill(NOTES[name], 116) + "\n\n"
        text += textwrap.fill(", ".join(f"`{op}`" for op in sections[name]), 116, break_on_hyphens=False) + "\n"
    text += "\n## Skipped\n\n| operation | why |\n|---|---|\n"
    return text + "".join(f"| `{name}` | {why} |\n" for name, why in sorted(SKIPPED.items()))


def main() -> None:
    """Walk, say what differs, write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all samples, which takes an hour; writes nothing")
    parser.add_argument("names", nargs="*", help="only these operations; writes nothing")
    options = parser.parse_args()
    from test_ops import DOCUMENT, ON_TWO

    every = 1 << 30
    full = [
        Variant(every, dim=dim, all_aligned=aligned, dtype=dtype)
        for dtype in (None, torch.float32)
        for dim in (0, 1)
        for aligned in (False, True)
    ]
    variants = [*full, Variant(every, how="in_place"), Variant(every, how="out")] if options.full else ON_TWO
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    team = team_of(2)
    outcomes: dict[str, Outcome] = {}
    for op in op_db:
        name = name_of(op)
        if name in SKIPPED or (options.names and name not in options.names and op.name not in options.names):
            continue
        outcome = outcomes[name] = walk(team, op, variants)
        for failure in outcome.failures:
            print(f"{name}: {failure}", flush=True)  # noqa: T201 - a script
    failed = sum(bool(outcome.failures) for outcome in outcomes.values())
    print(f"{len(outcomes)} operations, {failed} differ")  # noqa: T201 - a script
    if not options.full and not options.names:
        Path(DOCUMENT).parent.mkdir(exist_ok=True)
        Path(DOCUMENT).write_text(report(outcomes))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
