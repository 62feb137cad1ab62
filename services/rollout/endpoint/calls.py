"""What the endpoint and the episodes behind it say to each other: a call, its pieces, its answer, or why it is refused.

The endpoint knows HTTP and OpenAI's shapes; it knows neither tokens nor leases. Whoever answers a call knows those.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model wants called."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it; checked to be an object."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of an agent to the model, checked and in one form whatever the client wrote."""

    messages: list[dict[str, Any]]
    """Each has ``role`` (system, developer, user, assistant, tool) and ``content`` (a string, or None beside tool calls);
    an assistant's may have ``tool_calls`` and ``reasoning_content``, a tool's has ``tool_call_id``."""
    tools: list[dict[str, Any]] = []
    """OpenAI's function tools: {"type": "function", "function": {"name", "description", "parameters"}}."""
    max_tokens: int | None = None
    """Most tokens to sample; None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    template_arguments: dict[str, Any] = {}
    """Of the chat template, such as ``enable_thinking``; they come before those of the configuration."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Text that certainly belongs to the answer, as it grows."""

    content: str = ""
    reasoning: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer. The deltas before it, joined, are a beginning of its content and reasoning."""

    id: str
    created: int
    """Seconds since 1970. A call that is replayed has the id and the time of the first time."""
    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: FinishReason
    prompt_tokens: int
    token_ids: list[int]
    """The sampled tokens, the stop token included."""
    tokens: list[str]
    """The text of each, as far as it has one; a token may be part of a character."""
    logprobs: list[float]


class CallRefused(Exception):
    """This call cannot be answered; the agent gets ``status``, ``code`` and ``text``, which says the way out."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text


class Calls(Protocol):
    """The calls of one episode."""

    def call(self, request: CallRequest) -> AsyncIterator[Delta | Answer]:
        """Answer one call: deltas, then exactly one Answer. Calls of one episode may run at the same time.

        Closing the iterator early leaves the call to go on or to be replayed; nothing that was sampled is lost.
        Raises: CallRefused.
        """
        ...


class Episodes(Protocol):
    """The episodes that are under way on this rollout."""

    @property
    def model(self) -> str:
        """The model's name, as ``GET /v1/models`` lists it."""
        ...

    def calls_of(self, key: str) -> Calls:
        """Raises: CallRefused, status 401 for a key of no episode, 410 for one whose episode has ended."""
        ...
