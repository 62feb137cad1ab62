"""Messages between the endpoint and its episodes: a call, its pieces, its answer, or a refusal.

The endpoint knows HTTP and the dialects of clients, but neither tokens nor leases. The episodes know those.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function call that the model requests."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it; checked to be an object."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of an agent to the model, checked and normalised."""

    messages: list[dict[str, Any]]
    """Each has ``role`` (system, developer, user, assistant, tool) and ``content`` (a string, or None beside tool calls),
    and may have ``name``. An assistant's may have ``reasoning_content`` and ``tool_calls``, each of these {"id", "type":
    "function", "function": {"name", "arguments"}}, where ``arguments`` is the text of a JSON object. A tool's has
    ``tool_call_id``. The last message is not an assistant's."""
    tools: list[dict[str, Any]] = []
    """As in Chat Completions: {"type": "function", "function": {"name", "parameters"}}, with a ``description`` where the
    agent gave one. Names are unique. Empty when the agent chose that no tool may be called (``tool_choice``)."""
    role: int = 0
    """The role that the policy plays, as its place in agent.roles."""
    must_call: str | None = None
    """The tool that the answer must call, "" for any of ``tools``. The answer begins with the opening of such a call, which
    is put there and not sampled."""
    max_tokens: int | None = None
    """Most tokens to sample; None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    template_arguments: dict[str, Any] = {}
    """Variables of the chat template, such as ``enable_thinking``; they override those of the configuration."""


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Text that is final in the growing answer."""

    id: str
    """The answer's id; a client sees it with the first piece of a stream."""
    created: int
    """The answer's time."""
    content: str = ""
    reasoning: str = ""


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
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
    """The text of each, as far as it has one; a token may be part of a character (U+FFFD stands for it)."""
    logprobs: list[float]


class CallRefused(Exception):
    """This call cannot be answered; the agent gets ``status``, ``code`` and ``text``, which says what to do."""

    def __init__(
        self, status: int, code: str, text: str, *, param: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        """``param`` is the faulty field of the request, such as ``messages[2].content``. ``details``: what Anthropic's
        clients act on.
        """
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.param = param
        self.details = details


class Calls(Protocol):
    """The calls of one episode."""

    @property
    def temperature(self) -> float:
        """The episode's sampling temperature, whatever the agent asks for."""
        ...

    def can_demand(self, request: CallRequest) -> bool:
        """Whether ``request.must_call`` can be had: the model's format opens a call by a text of its own."""
        ...

    async def count(self, request: CallRequest) -> int:
        """Return the number of tokens of the request's prompt. Raises: CallRefused."""
        ...

    def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        """Answer one call: deltas, then exactly one CallAnswer. Calls of one episode may run at the same time.

        If the generator is closed early, the call continues or can be replayed; no sampled token is lost. Whoever has
        delivered the answer to the agent must exhaust the generator; until then an equal request gets this answer again.
        Raises: CallRefused.
        """
        ...


class Episodes(Protocol):
    """The episodes running on this rollout."""

    @property
    def model(self) -> str:
        """The model's name, as ``GET /v1/models`` lists it."""
        ...

    def calls_of(self, key: str) -> Calls:
        """Raises: CallRefused, status 401 for a key of no episode, 410 for one whose episode has ended."""
        ...
