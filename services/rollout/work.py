"""What the service of a rollout asks of whoever runs episodes: an environment's turns, or agents."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from gspo_protocol.codec import Array
from gspo_protocol.messages import Lease, Message
from gspo_services.rollout.sglang import GenerateRequest, OutputPiece


class EpisodeFailed(RuntimeError):
    """The episode cannot continue for a reason of its own; its lease is released as failed, with this text."""


class EpisodeSpared(EpisodeFailed):
    """The episode was ended, perhaps by no fault of its own: its lease is handed back, and no attempt is counted."""


class PolicyEngine(Protocol):
    """What episodes sample from: the client of an engine, or what answers in its place."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """See ``Engine.generate``."""
        ...

    async def stop_generating(self) -> None:
        """See ``Engine.stop_generating``."""
        ...


class EpisodeIntake(Protocol):
    """What takes the messages of episodes: the connection to the broker, or what stands in its place."""

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """See ``PeerClient.send``."""
        ...

    async def acknowledged(self) -> None:
        """Wait until everything that was sent so far is acknowledged."""
        ...


class EpisodeWork(Protocol):
    """One episode under one lease."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        ...

    @property
    def is_in_user_code(self) -> bool:
        """Whether it waits only for the user's code, which has its own deadline: no token is due."""
        ...

    async def run(self) -> None:
        """Run the episode to its end, and send it.

        Raises: EpisodeFailed; EpisodeSpared; EngineError: another engine can continue; ConfigurationError when no episode
        of this run can succeed.
        """
        ...

    async def send_rest(self) -> None:
        """After an early end of ``run``: send what another rollout needs to continue. Raises: EpisodeFailed."""
        ...


class EpisodeRunner(Protocol):
    """Runs the episodes of a rollout."""

    def begin(self, lease: Lease, arrays: Mapping[str, Array], tasks: asyncio.TaskGroup) -> EpisodeWork:
        """Make the episode of a lease; ``tasks`` outlives it. Nothing happens before ``run``."""
        ...

    async def stop_generating(self) -> None:
        """Have every generation end with the tokens that it has made, and begin no other. Raises: EngineError."""
        ...
