"""What an error must say besides its own message: which rows were being computed, and what was cut on a guess."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from evenly.parts import Items, TensorLeaf

if TYPE_CHECKING:
    import torch

    from evenly.batch import SplitPlan

_MOST_NAMED = 6


def name_shard(error: BaseException, plan: SplitPlan, replica: int, device: torch.device) -> None:
    """Note on a forward's error where it was raised, on which rows, and which arguments were cut on a guess."""
    name_rows(error, plan, replica, device)
    _name_guesses(error, plan, [replica])


def name_rows(error: BaseException, plan: SplitPlan, replica: int, device: torch.device) -> None:
    """Note on an error where it was raised, and on which rows."""
    start = sum(plan.rows[:replica])
    last = start + plan.rows[replica] - 1
    rows = f"row {start}" if start == last else f"rows {start} to {last}"
    _add_note(error, f"raised by replica {replica} ({device}), which computed {rows} of the batch's {plan.size}")


@contextmanager
def guesses_named(plan: SplitPlan) -> Generator[None]:
    """Around the joining of outputs: if they do not fit together, note what was cut on a guess."""
    try:
        yield
    except ValueError as error:
        _name_guesses(error, plan, range(plan.replicas))
        raise


def _name_guesses(error: BaseException, plan: SplitPlan, replicas: Sequence[int]) -> None:
    """Note which arguments were cut only because they have as many rows as the batch.

    A mask ``[T, T]`` beside a batch of T rows is one of them, and so are the targets: nobody can tell.
    """
    cuts = [
        f"{unit.path} ({_cut(plan, unit, replicas)})"
        for unit in plan.leaves
        if isinstance(unit, (TensorLeaf, Items)) and unit.guessed
    ]
    if not cuts:
        return
    more = f" and {len(cuts) - _MOST_NAMED} more" if len(cuts) > _MOST_NAMED else ""
    _add_note(
        error,
        f"cut, because they have as many rows as the batch: {', '.join(cuts[:_MOST_NAMED])}{more}. If each replica "
        "needs all of one, pass evenly.replicate(...) around it, or None for it in in_dims=",
    )


def _cut(plan: SplitPlan, unit: TensorLeaf | Items, replicas: Sequence[int]) -> str:
    if isinstance(unit, Items):
        return f"{len(unit.value)} items into {' and '.join(str(plan.rows[replica]) for replica in replicas)}"
    shape = list(unit.value.shape)
    into = [[*shape[: unit.dim], plan.rows[replica], *shape[(unit.dim or 0) + 1 :]] for replica in replicas]
    return f"{shape} into {' and '.join(map(str, dict.fromkeys(map(str, into))))}"


def _add_note(error: BaseException, note: str) -> None:
    """Add a line to what is printed of an exception."""
    if hasattr(error, "add_note"):
        cast("Any", error).add_note(note)
    elif error.args and isinstance(error.args[0], str):  # before Python 3.11
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
