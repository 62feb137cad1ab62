"""An agent's call while it is answered, and then until a client has taken its answer."""

import asyncio
from collections.abc import AsyncGenerator

from gspo_services.rollout.endpoint import CallAnswer, CallDelta, CallRefused, CallRequest
from gspo_services.rollout.episodes.fingerprints import call_digest, message_keys, prompt_setting
from gspo_services.rollout.episodes.records import CallRecord
from gspo_services.rollout.rendering import AnswerPiece


class LiveCall:
    """The answer of one call, for its followers: one at a time, another after the first has gone away."""

    def __init__(self, request: CallRequest) -> None:
        self.request = request
        self.keys = message_keys(request.messages)
        self.setting = prompt_setting(request)
        self.digest = call_digest(request, self.keys)
        self.is_followed = False
        self._said: list[CallDelta] = []
        self._outcome: CallAnswer | CallRefused | None = None
        self._changed = asyncio.Event()

    def say(self, record: CallRecord, piece: AnswerPiece) -> None:
        """Add text to the answer."""
        if piece.content or piece.reasoning:
            text = CallDelta(id=record.id, created=record.created, content=piece.content, reasoning=piece.reasoning)
            self._said.append(text)
            self._changed.set()

    def conclude(self, outcome: CallAnswer | CallRefused) -> None:
        """Conclude the call with an answer or a failure. Only the first time counts."""
        self._outcome = self._outcome or outcome
        self._changed.set()

    async def follow(self) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        """Yield all pieces of the answer from the beginning. Raises: CallRefused."""
        self.is_followed = True
        num_given = 0
        try:
            while True:
                self._changed.clear()
                for piece in self._said[num_given:]:
                    num_given += 1
                    yield piece
                if num_given == len(self._said) and self._outcome is not None:
                    break
                await self._changed.wait()
            if isinstance(self._outcome, CallRefused):
                raise self._outcome
            yield self._outcome
        finally:
            self.is_followed = False
