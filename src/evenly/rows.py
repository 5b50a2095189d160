"""How many rows of a batch each replica computes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def split_rows(size: int, devices: int, weights: Sequence[float] | None = None, min_rows: int = 1) -> tuple[int, ...]:
    """How many rows each replica computes.

    Args:
        size: Rows of the batch.
        devices: Number of replicas there are.
        weights: Proportions, one per replica. A weight of 0 leaves the replica out, which only the last
            replicas can be: replica 0 always takes part. Every other replica gets at least `min_rows` rows.
        min_rows: No replica gets fewer rows, unless the whole batch has fewer.

    Returns:
        One number per replica that takes part, all positive (except for an empty batch) and summing to
        `size`. Without weights they differ by at most one, the larger first.

    Raises:
        ValueError: If weights are negative, not one per replica, or 0 before a positive one.
    """
    if weights is not None:
        devices = _count_weighted(weights, devices)
    taking_part = max(1, min(devices, size // max(min_rows, 1)))
    if weights is None or taking_part == 1:
        base, extra = divmod(size, taking_part)
        return (base + 1,) * extra + (base,) * (taking_part - extra)
    total = sum(weights[:taking_part])
    ideal = [size * weight / total for weight in weights[:taking_part]]
    rows = [max(min_rows, int(share)) for share in ideal]
    while (missing := size - sum(rows)) != 0:
        sign = 1 if missing > 0 else -1
        movable = [r for r in range(taking_part) if sign > 0 or rows[r] > min_rows]
        rows[max(movable, key=lambda r: (sign * (ideal[r] - rows[r]), -r))] += sign
    return tuple(rows)


def _count_weighted(weights: Sequence[float], devices: int) -> int:
    if len(weights) != devices:
        raise ValueError(f"split weights must be one per replica: got {len(weights)} for {devices} replicas")
    positive = [weight > 0 for weight in weights]
    sensible = all(weight >= 0 and math.isfinite(weight) for weight in weights)
    if not sensible or not positive[0] or sorted(positive, reverse=True) != positive:
        raise ValueError(
            "split weights must be positive numbers, except that the last replicas can be left out with 0: got "
            f"{list(weights)}"
        )
    return sum(positive)
