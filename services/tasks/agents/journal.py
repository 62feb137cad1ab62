"""The record of an episode's steps, which its worker writes through the parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gspo.tasks.environments import Plain


class RecordedStep(NamedTuple):
    """One step of an episode that has a durable result."""

    name: str
    arguments: str
    """A digest of what its function was called with."""
    result: Plain


class StepJournal(Protocol):
    """The steps of one episode. Its methods are called one after another, in the order of the steps."""

    @property
    def recorded(self) -> Sequence[RecordedStep]:
        """What earlier runs of the episode recorded: the step at each ordinal, from 0."""
        ...

    async def record(self, step: RecordedStep, ordinal: int) -> None:
        """Return when the step is durable: then the agent goes on. An error ends the episode and comes out of ``solve``."""
        ...

    async def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        """The agent's step ``ordinal`` is now ``name``, or has other arguments: the recorded ones from there on are void."""
        ...


class NoJournal:
    """For episodes that are never replayed: nothing is recorded."""

    @property
    def recorded(self) -> Sequence[RecordedStep]:
        return ()

    async def record(self, step: RecordedStep, ordinal: int) -> None:
        return

    async def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        return
