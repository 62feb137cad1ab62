"""The interface of renderers: one model's chat format, from messages to token ids and from sampled ids to an answer.

Sampled ids are never rendered again. The prompt of the next turn is the ids so far, plus what ``bridge`` returns; where
that would not be exact, ``bridge`` returns None, and the conversation continues in a new sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

Messages = Sequence[Mapping[str, Any]]
"""Messages as an OpenAI client sends them."""
Tools = Sequence[Mapping[str, Any]]
"""Tools as an OpenAI client sends them: ``{"type": "function", "function": {...}}``."""
Arguments = Mapping[str, Any]
"""Variables of the chat template, such as ``enable_thinking``."""

NO_ARGUMENTS: Final[Arguments] = {}


class RenderingError(ValueError):
    """A conversation or setting cannot be rendered; the text says why."""


class TooLongError(RenderingError):
    """A conversation has far more tokens than any may have; it was not divided into all of them."""


@dataclass(frozen=True)
class ParsedCall:
    """One call of a tool."""

    name: str
    arguments_json: str
    """A JSON object, as OpenAI's API has it."""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """An answer as an OpenAI client receives it."""

    content: str = ""
    reasoning: str | None = None
    """None where the answer has no reasoning at all."""
    tool_calls: list[ParsedCall] = field(default_factory=list)
    problem: str | None = None
    """Why a tool call is not in ``tool_calls``, but stands in ``content`` as the model wrote it."""


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Texts at which an answer changes from one part to the next, for streaming."""

    reasoning_opens: str = ""
    reasoning_closes: str = ""
    """Empty where the model's format has no reasoning."""
    calls_open: tuple[str, ...] = ()
    """Text after any of these is not streamed: only the whole answer shows whether it is a tool call."""
    calls_within: tuple[str, ...] = ()
    """Other texts of a tool call that may be special tokens."""
    call_is_answer: bool = False
    """A tool call is a whole answer that begins with a brace."""


@dataclass(frozen=True)
class AnswerPiece:
    """The next text of an answer."""

    reasoning: str = ""
    content: str = ""


class Stream(Protocol):
    """An answer while it is sampled."""

    stopped_at: int | None
    """How many of the sampled ids are the answer, once a stop string is complete: end the request, drop later ids."""

    def feed(self, token_ids: Sequence[int]) -> AnswerPiece:
        """Add ids; returns the text that is now final."""

    def finish(self, parsed: Parsed) -> AnswerPiece:
        """Return the rest of ``parsed``, the parser's result for the whole answer."""


class Renderer(Protocol):
    """The chat format of one model. Its methods may be called for any number of conversations at the same time."""

    @property
    def name(self) -> str:
        """The format's source: ``template``, or the name of the family."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an assistant's turn."""

    @property
    def markers(self) -> Markers:
        """For streaming."""

    def prompt_ids(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> list[int]:
        """Token ids of a conversation and of the beginning of the assistant's turn.

        They are the ids of the model's own chat template. Raises: RenderingError when it refuses the conversation.
        """

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
    ) -> list[int] | None:
        """Token ids between an assistant's turn and its next one, where ``messages`` were said in between.

        ``sampled_ids`` are that turn, with or without a stop token at the end, and ``prompt_ids`` is what stood before it.
        A turn that was cut by its length is closed. The reasoning of earlier turns stays, also where the model's template
        would leave it out of a new prompt. None where the ids would not be those that the format has at this place.
        """

    def call_opening(self, name: str, tools: Tools, arguments: Arguments = NO_ARGUMENTS) -> list[int] | None:
        """Token ids that begin an answer which calls the tool ``name``, "" for any: up to where its name ends or begins.

        None where no such text begins an answer: the format writes calls as plain text, or reasons before it.
        """

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
        prompt_ids: Sequence[int] = (),
    ) -> Parsed:
        """Content, reasoning and tool calls of one assistant's turn. Never raises, whatever the ids.

        ``prompt_ids`` tells whether the prompt has opened the reasoning; without it the turn speaks for itself.
        """

    def stream(self, stops: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> Stream:
        """Begin a new answer, to be fed with its ids. Raises: RenderingError for an empty stop string."""

    def text(self, sampled_ids: Sequence[int]) -> str:
        """The text of one assistant's turn: everything that the model wrote, without its stop and other special tokens."""
