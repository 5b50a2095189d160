"""The processes behind a model: one per device beyond the first."""

from __future__ import annotations


def shutdown() -> None:
    """Stop the replicas of all teams. A model that is called afterwards starts new ones."""
    from evenly.team import teams

    teams.shutdown()


__all__ = ["shutdown"]
