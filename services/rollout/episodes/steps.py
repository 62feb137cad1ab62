"""The steps of an agent, in the journal of its episode."""

from collections.abc import Sequence
from typing import NoReturn

from gspo.environments import Plain
from services.rollout.episodes.errors import EpisodeBroken
from services.rollout.episodes.records import step_entry
from services.rollout.episodes.writer import EpisodeWriter
from services.user_code import RecordedStep


class EpisodeSteps:
    """The ``StepJournal`` of an episode that a broker keeps."""

    def __init__(self, writer: EpisodeWriter, recorded: Sequence[RecordedStep]) -> None:
        self._writer = writer
        self.recorded = recorded
        """The steps of earlier runs of the episode."""

    async def record(self, name: str, ordinal: int, result: Plain) -> None:
        """Return when the broker has acknowledged the step, and all tokens before it: the agent acts on both.

        Raises: EpisodeBroken when the result does not fit the journal.
        """
        async with self._writer.alone():
            await self._writer.entry(step_entry(name, result))
        await self._writer.durable()

    async def diverged(self, ordinal: int, recorded: str, name: str) -> NoReturn:
        """Raises: EpisodeBroken. What an earlier run did after this point cannot be taken back."""
        text = f"diverged: step {ordinal} of the agent was {recorded!r} and is {name!r} when it is replayed"
        raise EpisodeBroken(f"{text}: its calls and steps must follow from its task and seed", outcome="diverged")
