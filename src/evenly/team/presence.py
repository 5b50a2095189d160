"""Whether this process is a replica, and how large it is."""

from __future__ import annotations

_index = 0


def become_replica(index: int) -> None:
    """Say that this process is replica ``index``, which is not the driver."""
    global _index  # noqa: PLW0603 - once per process
    _index = index


def inside_replica() -> bool:
    """Whether this process is a replica: a wrapped module inside of the module just runs here."""
    return _index > 0


def process_memory() -> int:
    """Memory of this process in bytes, shared pages counted in proportion to the processes that share them."""
    import psutil

    return int(psutil.Process().memory_full_info().pss)
