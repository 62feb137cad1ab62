"""The steps of an episode in their order: which one a replay returns, and where it ends. Standard library only."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class EpisodeRecord(Protocol):
    """Where an episode's steps are recorded."""

    async def record(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        """Return when the step is durable."""
        ...

    def record_now(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        """The same for an agent in a thread: wait until the step is durable."""
        ...

    def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        """Step ``ordinal`` was ``recorded`` and is now ``name``, or has other arguments: no later step is replayed."""
        ...


class StepOrder:
    """Where an episode is in its steps."""

    def __init__(self, recorded: Sequence[tuple[str, str, Any]], record: EpisodeRecord) -> None:
        self._recorded = recorded
        self._running: str | None = None
        self.record = record
        self.ordinal = 0
        """Of the next step."""

    @property
    def is_replay(self) -> bool:
        """Whether the next step has a recorded result."""
        return self.ordinal < len(self._recorded)

    def require_idle(self, name: str) -> None:
        """Raises: RuntimeError when another step is under way."""
        if self._running is not None:
            # Their order would depend on timing, and a replay would mix up their results.
            raise RuntimeError(f'step "{name}" begins while "{self._running}" is under way: await one before the next')

    def replays(self, name: str, arguments: str) -> bool:
        """Whether the next step is the recorded one. Where it is another, the replay ends."""
        self.require_idle(name)
        if not self.is_replay:
            return False
        recorded, recorded_arguments, _ = self._recorded[self.ordinal]
        if (recorded, recorded_arguments) == (name, arguments):
            return True
        self._recorded = self._recorded[: self.ordinal]
        self.record.diverged(self.ordinal, recorded, name)
        return False

    def replayed(self) -> Any:
        """The next step's recorded result."""
        self.ordinal += 1
        return self._recorded[self.ordinal - 1][2]

    def taken(self) -> int:
        """The ordinal of a step that is recorded now; it is taken even if nobody awaits its record."""
        self.ordinal += 1
        return self.ordinal - 1

    @contextmanager
    def under_way(self, name: str) -> Iterator[None]:
        """Meanwhile no other step may begin."""
        self._running = name
        try:
            yield
        finally:
            self._running = None


def arguments_digest(args: "tuple[Any, ...]") -> str:
    """Return the digest of a step's arguments: plain data count by value, anything else by type."""
    try:
        text = json.dumps(args, sort_keys=True, default=lambda value: type(value).__qualname__)
    except (TypeError, ValueError, RecursionError):  # keys of other kinds, circles, endless nesting
        text = json.dumps([type(value).__qualname__ for value in args])
    return hashlib.sha256(text.encode()).hexdigest()
