"""The processes behind a model: one per device beyond the first."""

from evenly.team.teams import shutdown

__all__ = ["shutdown"]
