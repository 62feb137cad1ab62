"""An engine that is watched: what it is asked, what it answers, and how long that takes."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from gspo_protocol.messages import VersionRun
from gspo_services.prepare.env_try.prompts import Prompt, Prompts, WatchedRenderer
from gspo_services.rollout.rendering import Parsed, Renderer
from gspo_services.rollout.sglang import GenerateRequest, OutputPiece
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import PolicyEngine
from gspo_services.runs.local_play import VERSION
from gspo_services.shared.runtime.clock import Clock

AnswerEnd = Literal["stop", "length", "abort", "stop string", "cut off"]
"""stop string: one that the agent's call named is complete. cut off: the episode ended first."""


@dataclass(kw_only=True)
class PlayedTurn:
    """One answer of the policy: a turn of an environment's episode, a call of an agent."""

    number: int
    """Answers that began before it in its episode."""
    prompt: Prompt | None
    """None where the messages are not known."""
    context: list[int]
    """Ids that the engine was given."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: AnswerEnd = "cut off"
    seconds: float = 0.0
    answer: Parsed = field(default_factory=Parsed)
    """What the tokens say."""


class TurnWatcher(Protocol):
    """Hears of each answer when it begins and when it has ended."""

    def asked(self, turn: PlayedTurn) -> None: ...

    def answered(self, turn: PlayedTurn) -> None: ...


class EpisodeWatch:
    """The ``PolicyEngine`` of an episode after the other, in front of the one that answers."""

    def __init__(self, engine: PolicyEngine, tokenizer: ChatTokenizer, prompts: Prompts, clock: Clock) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._clock = clock
        self._renderer: Renderer | None = None
        self._watcher: TurnWatcher | None = None
        self._num_running = 0
        self._since_s = 0.0
        self._model_s = 0.0
        self.turns: list[PlayedTurn] = []
        """Of the episode that began last, in the order in which they began."""

    def begin(self, watcher: TurnWatcher) -> None:
        """Another episode begins; what is known about the one before is forgotten."""
        self._watcher = watcher
        self._prompts.clear()
        self.turns = []
        self._model_s = 0.0

    @property
    def model_s(self) -> float:
        """Seconds of the episode in which at least one answer was under way."""
        return self._model_s + (self._clock.now() - self._since_s if self._num_running else 0.0)

    @property
    def refused(self) -> list[Mapping[str, Any]]:
        """Messages that the chat template has refused, if the episode ended by that."""
        return self._prompts.refused

    def watched(self, renderer: Renderer) -> Renderer:
        """``renderer``, watched: agents' answers are shown as it parses them."""
        self._renderer = renderer
        return WatchedRenderer(renderer, self._prompts)

    async def stop_generating(self) -> None:
        """See ``Engine.stop_generating``."""
        await self._engine.stop_generating()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """See ``Engine.generate``."""
        turn = PlayedTurn(
            number=len(self.turns),
            prompt=self._prompts.found(request.input_ids),
            context=[int(token) for token in request.input_ids],
        )
        self.turns.append(turn)
        begin = self._begin()
        if self._watcher is not None:
            self._watcher.asked(turn)
        try:
            async with aclosing(self._engine.generate(request)) as pieces:
                async for piece in pieces:
                    turn.token_ids += piece.token_ids.tolist()
                    turn.logprobs += piece.logprobs.tolist()
                    turn.end = piece.finish_reason or turn.end
                    yield _of_the_tried_version(piece)
        except GeneratorExit:
            # An agent's call takes no more than its answer: what ends it before the engine does is a stop string.
            turn.end = "stop string" if turn.end == "cut off" else turn.end
            raise
        finally:
            turn.seconds = self._end(begin)
            turn.answer = self._parsed(turn)
            if self._watcher is not None:
                self._watcher.answered(turn)

    def _begin(self) -> float:
        now = self._clock.now()
        if not self._num_running:
            self._since_s = now
        self._num_running += 1
        return now

    def _end(self, begin: float) -> float:
        """Seconds since ``begin``."""
        now = self._clock.now()
        self._num_running -= 1
        if not self._num_running:
            self._model_s += now - self._since_s
        return now - begin

    def _parsed(self, turn: PlayedTurn) -> Parsed:
        if self._renderer is None:
            stop_ids = self._tokenizer.stop_ids
            return Parsed(content=self._tokenizer.action_text([token for token in turn.token_ids if token not in stop_ids]))
        prompt = turn.prompt
        if prompt is None:
            return self._renderer.parse(turn.token_ids, prompt_ids=turn.context)
        before = turn.context[: len(turn.context) - len(prompt.opening)]
        return self._renderer.parse([*prompt.opening, *turn.token_ids], prompt.tools, prompt.arguments, before)


def _of_the_tried_version(piece: OutputPiece) -> OutputPiece:
    """A server may serve any version; here there is only one."""
    num_tokens = len(piece.token_ids)
    return msgspec.structs.replace(piece, version_runs=[VersionRun(VERSION, num_tokens)] if num_tokens else [])
