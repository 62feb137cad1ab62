"""The steps of an agent, in the journal of its episode."""

from collections.abc import Sequence

import structlog

from gspo_services.rollout.episodes.records import StepRecord
from gspo_services.rollout.episodes.writer import EpisodeWriter
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.tasks.agents import RecordedStep

log = structlog.get_logger()


class EpisodeSteps:
    """The ``StepJournal`` of an episode that a broker keeps."""

    def __init__(
        self, trajectory_id: int, writer: EpisodeWriter, recorded: Sequence[RecordedStep], metrics: RolloutMetrics
    ) -> None:
        self._trajectory_id = trajectory_id
        self._writer = writer
        self._metrics = metrics
        self.recorded = recorded
        """The steps of earlier runs of the episode."""

    async def record(self, step: RecordedStep, ordinal: int) -> None:
        """Return when the broker has acknowledged the step, and all tokens before it: the agent acts on both.

        Raises: EpisodeFailed when the result does not fit the journal.
        """
        record = StepRecord(ordinal=ordinal, name=step.name, arguments=step.arguments, result=step.result)
        async with self._writer.alone():
            await self._writer.entry(record.entry())
        await self._writer.durable()

    async def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        """The agent goes another way from this step on; the journal says so with the step's own record."""
        self._metrics.divergences.inc()
        log.warning("agent_diverged", trajectory_id=self._trajectory_id, step=ordinal, recorded=recorded, name=name)
