"""Episodes that answer as a test scripted them: the endpoint's other side, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gspo_services.rollout.endpoint import CallAnswer, CallDelta, CallRefused, CallRequest, ToolCall

CREATED = 1_700_000_000


def delta(content: str = "", *, reasoning: str = "", call_id: str = "call-1") -> CallDelta:
    return CallDelta(id=call_id, created=CREATED, content=content, reasoning=reasoning)


def answer(
    content: str | None = "Hello.",
    *,
    reasoning: str | None = None,
    tool_calls: Sequence[ToolCall] = (),
    tokens: Sequence[str] = ("Hel", "lo", ".", "<|end|>"),
    call_id: str = "call-1",
) -> CallAnswer:
    return CallAnswer(
        id=call_id,
        created=CREATED,
        content=content,
        reasoning=reasoning,
        tool_calls=list(tool_calls),
        finish_reason="tool_calls" if tool_calls else "stop",
        prompt_tokens=7,
        token_ids=list(range(len(tokens))),
        tokens=list(tokens),
        logprobs=[-0.5 * (index + 1) for index in range(len(tokens))],
    )


Step = CallDelta | CallAnswer | asyncio.Event | Exception
"""An event is waited for; an exception is raised."""


class ScriptedCalls:
    """Answers every call with the same steps."""

    temperature: float = 1.0
    can_open: bool = True
    """Whether the model's format has an opening for the calls of tools."""

    def __init__(self, *steps: Step) -> None:
        self.steps: tuple[Step, ...] = steps or (answer(),)
        self.requests: list[CallRequest] = []
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        """A call has given all its steps, or was closed before."""
        self.num_taken = 0
        """Calls whose answer has reached its agent, as far as the endpoint knows."""

    def can_demand(self, request: CallRequest) -> bool:
        return self.can_open

    async def count(self, request: CallRequest) -> int:
        return sum(len(message["content"] or "") for message in request.messages)

    async def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        self.requests.append(request)
        try:
            for step in self.steps:
                if isinstance(step, asyncio.Event):
                    self.started.set()
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
            self.num_taken += 1
        finally:
            self.ended.set()


class ScriptedEpisodes:
    """Episodes by key."""

    def __init__(self, **calls: ScriptedCalls) -> None:
        self.calls = calls
        self.ended: set[str] = set()

    @property
    def model(self) -> str:
        return "org/tiny"

    def calls_of(self, key: str) -> ScriptedCalls:
        if key in self.ended:
            raise CallRefused(410, "episode_ended", "the episode of this key has ended: start another one")
        if key not in self.calls:
            raise CallRefused(401, "invalid_api_key", "no episode has this key")
        return self.calls[key]
