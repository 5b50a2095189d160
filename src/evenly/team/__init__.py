"""The processes behind a model: one per device beyond the first."""

from evenly.team.team import shutdown

__all__ = ["shutdown"]
