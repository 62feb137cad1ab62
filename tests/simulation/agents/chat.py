"""A chat format small enough that the audit can read it back: from the ids of a context to what was said in it.

As with real tokenizers, an answer that is rendered again has other ids than those that were sampled, and the same text: each
word then has a token before it that has no text.
"""

from collections.abc import Iterable, Sequence

from gspo_services.rollout.rendering import AnswerPiece, Arguments, Markers, Messages, Parsed, Tools
from gspo_services.rollout.rendering.interface import NO_ARGUMENTS
from gspo_services.rollout.rendering.stops import StopStrings
from tests.simulation.episodes import FIRST_DIGIT, FIRST_WORD, MARK, NUM_WORDS, STOP

Conversation = tuple[tuple[str, str], ...]
"""Role and text of each message."""

ROLES = {"user": MARK, "tool": 198, "assistant": 197}
BEFORE_A_WORD = 196
SPACE = 195
FIRST_CHARACTER = 0x4E00
PADDING = "~"
"""It makes a message long, and has no token."""

_TEXTS = {
    SPACE: " ",
    **{FIRST_DIGIT + digit: str(digit) for digit in range(10)},
    **{word: chr(FIRST_CHARACTER + word) for word in range(FIRST_WORD, FIRST_WORD + NUM_WORDS)},
}
_IDS = {text: [BEFORE_A_WORD, token] if token < FIRST_WORD + NUM_WORDS else [token] for token, text in _TEXTS.items()}
_ROLES_BY_ID = {token: role for role, token in ROLES.items()}


def text_of(token_ids: Iterable[int]) -> str:
    return "".join(_TEXTS.get(token, "") for token in token_ids)


def conversation_of(messages: Messages) -> Conversation:
    return tuple((message["role"], message["content"].replace(PADDING, "")) for message in messages)


def prompt_ids(messages: Messages) -> list[int]:
    """A conversation and the beginning of an answer."""
    return [*_rendered(messages), ROLES["assistant"]]


def bridge_ids(last: int, messages: Messages) -> list[int]:
    """What follows an answer whose last token is ``last``, up to the beginning of the next one."""
    return [*([] if last == STOP else [STOP]), *_rendered(messages), ROLES["assistant"]]


def questioned(token_ids: Sequence[int]) -> tuple[Conversation, int]:
    """What was said in a context before its last answer, and where this answer begins."""
    begin = len(token_ids) - token_ids[::-1].index(ROLES["assistant"])
    said: list[tuple[str, list[int]]] = []
    for token in token_ids[: begin - 1]:
        if token in _ROLES_BY_ID:
            said.append((_ROLES_BY_ID[token], []))
        else:
            said[-1][1].append(token)
    return tuple((role, text_of(ids)) for role, ids in said), begin


def _rendered(messages: Messages) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids.append(ROLES[message["role"]])
        for character in message["content"].replace(PADDING, ""):
            ids += _IDS[character]
        if message["role"] == "assistant":
            ids.append(STOP)
    return ids


class SimStream:
    """See ``Stream``. With stop strings, nothing is certain before the end."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = StopStrings(stops)
        self._num_fed = 0
        self.stopped_at: int | None = None

    def feed(self, token_ids: Sequence[int]) -> AnswerPiece:
        for token in token_ids:
            self._num_fed += 1
            if self.stopped_at is None and self._stops.feed(text_of([token])) is not None:
                self.stopped_at = self._num_fed
        return AnswerPiece(content="" if self._stops.strings else text_of(token_ids))

    def finish(self, parsed: Parsed) -> AnswerPiece:
        raise NotImplementedError


class SimRenderer:
    """See ``Renderer``."""

    name = "simulated"
    stop_ids = frozenset({STOP})
    markers = Markers()

    def prompt_ids(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> list[int]:
        return prompt_ids(messages)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
    ) -> list[int] | None:
        return bridge_ids(sampled_ids[-1], messages)

    def call_opening(self, name: str, tools: Tools, arguments: Arguments = NO_ARGUMENTS) -> list[int] | None:
        return None

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
        prompt_ids: Sequence[int] = (),
    ) -> Parsed:
        return Parsed(content=text_of(sampled_ids))

    def stream(self, stops: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> SimStream:
        return SimStream(stops)

    def text(self, sampled_ids: Sequence[int]) -> str:
        return text_of(sampled_ids)
