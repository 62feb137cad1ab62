"""Short answers that are asked for in the same turn of the event loop travel as one HTTP request.

For an answer of a few tokens the exchange costs the server's front and this process more than the model does
(docs/evidence/whole-runs.md). SGLang answers a joint request when the last of its samples has ended, so only short answers
are asked for together, and none waits for a request that comes later. Whoever asks first sends for all.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from gspo_services.rollout.sglang.generation import joint_body
from gspo_services.rollout.sglang.http import EngineError, EngineHttp, EngineRefused, decode_answer

MAX_JOINT: Final = 16
"""Samples of one request."""
MAX_JOINT_TOKENS: Final = 16
"""Tokens of the longest answer that others may wait for: two of the intervals in which requests begin on a CPU."""
MAX_JOINT_INPUT_TOKENS: Final = 4096
"""Tokens of all prompts of one request: no answer waits for many long prompts."""


class AskAlone(Exception):
    """The joint request failed for an unknown sample: each must be asked for alone."""


class _Joint:
    """The samples of one joint request, and their waiters."""

    def __init__(self) -> None:
        self.fields: list[dict[str, Any]] = []
        self.answers: list[asyncio.Future[bytes]] = []
        self._num_tokens = 0

    def has_room(self, num_tokens: int) -> bool:
        return len(self.fields) < MAX_JOINT and self._num_tokens + num_tokens <= MAX_JOINT_INPUT_TOKENS

    def add(self, fields: dict[str, Any]) -> asyncio.Future[bytes]:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.fields.append(fields)
        self.answers.append(answer)
        self._num_tokens += len(fields["input_ids"])
        return answer

    def answered(self, payloads: list[bytes]) -> None:
        # A waiter that gave up has a future that is done.
        for answer, payload in zip(self.answers, payloads, strict=True):
            if not answer.done():
                answer.set_result(payload)

    def failed(self, error: BaseException) -> None:
        for answer in self.answers[1:]:
            if not answer.done():
                answer.set_exception(type(error)(str(error)) if isinstance(error, EngineError) else AskAlone())


class JointRequests:
    """The short answers of one engine.

    produces:     the JSON answer to each request, as if it had been asked for alone
    waits for:    the engine, until the last sample of the joint request has ended
    unblocked by: its answer; its error, or the end of whoever sent it, after which each is asked for alone
    """

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._gathering: _Joint | None = None

    async def answers(self, fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the one answer to ``fields`` of /generate, which is not streamed.

        Raises: AskAlone; what ``EngineHttp.answers`` raises.
        """
        joint = self._gathering
        if joint is None or not joint.has_room(len(fields["input_ids"])):
            joint = self._gathering = _Joint()
        answer = joint.add(fields)
        if len(joint.fields) == 1:
            await self._send(joint)
        yield await answer

    async def _send(self, joint: _Joint) -> None:
        try:
            try:
                await asyncio.sleep(0)  # All that ask in this turn of the loop come along.
            finally:
                if self._gathering is joint:
                    self._gathering = None
            joint.answered(await self._asked(joint.fields))
        except BaseException as error:
            joint.failed(error)
            raise

    async def _asked(self, fields: list[dict[str, Any]]) -> list[bytes]:
        body = msgspec.json.encode(fields[0]) if len(fields) == 1 else joint_body(fields)
        try:
            async with aclosing(self._http.answers(body, stream=False)) as contents:
                content = await anext(contents)
        except EngineRefused as error:
            if len(fields) == 1:
                raise
            raise AskAlone from error
        if len(fields) == 1:
            return [content]
        payloads = decode_answer(content, list[msgspec.Raw])
        if len(payloads) != len(fields):
            raise EngineError(f"{len(fields)} samples were requested together, {len(payloads)} came back: {content[:300]!r}")
        return [bytes(payload) for payload in payloads]
