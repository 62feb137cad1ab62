"""Checks of how tasks and groups are chosen: what dynamic sampling may cost, and tasks that could never rest."""

from services.checking.sampling.findings import sampling_findings

__all__ = ["sampling_findings"]
