"""One episode in a worker, as the parent keeps it."""

from __future__ import annotations

import asyncio

from gspo_services.tasks.agents.messages import WorkerComputer, WorkerDiverged, WorkerDone, WorkerStep
from gspo_services.tasks.agents.results import AgentResult

EpisodeNews = WorkerStep | WorkerComputer | WorkerDiverged | WorkerDone | AgentResult
"""What an episode hears: from its worker, or the result that the worker's end means for it."""


class WorkerEpisode:
    """One episode in a worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.news: asyncio.Queue[EpisodeNews] = asyncio.Queue()
        self.is_done = False
        self.must_end_at: float | None = None
        """When its worker is killed because it has not ended (the loop's time)."""
