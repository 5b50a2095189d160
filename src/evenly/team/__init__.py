"""The processes behind a model: one per device beyond the first."""
