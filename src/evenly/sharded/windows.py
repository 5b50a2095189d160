"""Views that cut through the rows: ``out[0]``, ``out[:3]``, ``for row in out``.

Such a piece is brought here; the tensor stays where it is. Only when somebody writes to one of them do both have to be
here for good, to share memory again.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from evenly.rules.plan import Op, aten
from evenly.sharded import conjugation
from evenly.sharded.content import Shards, Window
from evenly.sharded.geometry import stand_in
from evenly.sharded.tensor import ShardedTensor


def run_window(function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Run a view operation on a sharded tensor.

    Returns:
        What it returns, as tensors that know what they are views of, and how many bytes were gathered for it.
    """
    base = cast("ShardedTensor", args[0])
    geometry = function(stand_in(base), *args[1:], **kwargs)
    near = _near(function, base.shards, args[1:])
    with conjugation.respected():
        found = function(base.plain() if near is None else near, *args[1:], **kwargs)
    views: list[Tensor] = [geometry] if isinstance(geometry, Tensor) else list(geometry)
    pieces: list[Tensor] = [found] if isinstance(found, Tensor) else list(found)
    outputs: list[ShardedTensor] = []
    for position, (view, piece) in enumerate(zip(views, pieces, strict=True)):
        # A copy of its own: the whole tensor is not to stay here for the sake of a piece.
        window = Window(piece.clone(), base.writes)
        output = ShardedTensor(window, view.shape, view.stride(), int(view.storage_offset()))
        outputs.append(output.become_view(base, again(function, args[1:], kwargs, position)))
    size = 0 if near is not None or base.shards is None else base.numel() * base.element_size()
    return outputs[0] if isinstance(found, Tensor) else type(found)(outputs), size


def _near(function: Op, shards: Shards | None, rest: tuple[Any, ...]) -> Tensor | None:
    """The driver's own rows, if they are all that is asked for."""
    if shards is None or function not in (aten.select.int, aten.slice.Tensor):
        return None
    dim, *where = rest or (0,)
    mine = shards.rows[0]
    if dim % shards.local.dim() != shards.dim:
        return None
    if function is aten.select.int:
        return shards.local if 0 <= where[0] < mine else None
    start, end = (*where, None, None)[:2]
    return shards.local if 0 <= (start or 0) and end is not None and 0 <= end <= mine else None


def again(function: Op, rest: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> Any:
    """How to make a view again, from the tensor that it is a view of."""

    def make(base: Tensor) -> Tensor:
        found = function(base, *rest, **kwargs)
        return found if isinstance(found, Tensor) else found[position]

    return make
