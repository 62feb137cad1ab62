"""Which messages stand behind the tokens that an engine is given.

An engine sees ids alone. Whatever renders a conversation passes here, and the messages can be found again by the ids that
were made of them: to show them, and to answer them without a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gspo_services.rollout.rendering import Arguments, Markers, Messages, Parsed, Renderer, Stream, Tools
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from gspo_services.rollout.tokenizer import Messages as PlainMessages
from gspo_services.shared.settings import Settings

NO_ARGUMENTS: Arguments = {}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Messages that the policy is to answer."""

    token_ids: tuple[int, ...]
    """What was rendered of them: the end of what the engine is given, or all of it."""
    messages: list[Mapping[str, Any]]
    tools: Tools = ()
    arguments: Arguments = field(default_factory=dict)
    is_new: bool
    """They begin a conversation; otherwise they go on with one."""
    opening: tuple[int, ...] = ()
    """What follows them and begins the answer, where the agent demanded a call of a tool."""


class Prompts:
    """The prompts of one episode."""

    def __init__(self) -> None:
        self._known: list[Prompt] = []
        self._openings: list[tuple[int, ...]] = []
        self.refused: list[Mapping[str, Any]] = []
        """What the chat template has refused of an environment's messages; an agent is told, and may go another way."""

    def add(self, prompt: Prompt) -> None:
        self._known.append(prompt)

    def opens_with(self, token_ids: Sequence[int]) -> None:
        """An answer may begin with these."""
        if tuple(token_ids) not in self._openings:
            self._openings.append(tuple(token_ids))

    def clear(self) -> None:
        """Another episode begins."""
        self._known.clear()
        self._openings.clear()
        self.refused = []

    def found(self, input_ids: Sequence[int] | np.ndarray[Any, Any]) -> Prompt | None:
        """The newest prompt that these ids end with; None when they were rendered elsewhere."""
        whole = tuple(int(token) for token in input_ids)
        for opening in ((), *self._openings):
            given = whole[: len(whole) - len(opening)]
            for prompt in reversed(self._known) if given + opening == whole else ():
                if given[-len(prompt.token_ids) :] == prompt.token_ids and (not prompt.is_new or given == prompt.token_ids):
                    return replace(prompt, opening=opening)
        return None


class WatchedTokenizer(ChatTokenizer):
    """A tokenizer that notes what environments' conversations are rendered from."""

    def __init__(self, settings: Settings, prompts: Prompts) -> None:
        """Load the tokenizer of ``[model]``. Raises: TokenizerError."""
        model = settings.model
        super().__init__(model.path, model.template_arguments, show_special_tokens=model.show_special_tokens)
        self._prompts = prompts

    def prompt_ids(self, messages: PlainMessages) -> list[int]:
        """See ``ChatTokenizer.prompt_ids``."""
        with self._noting(messages):
            ids = super().prompt_ids(messages)
        self._prompts.add(Prompt(token_ids=tuple(ids), messages=_copied(messages), is_new=True))
        return ids

    def observation_ids(self, messages: PlainMessages) -> list[int]:
        """See ``ChatTokenizer.observation_ids``."""
        with self._noting(messages):
            ids = super().observation_ids(messages)
        self._prompts.add(Prompt(token_ids=tuple(ids), messages=_copied(messages), is_new=False))
        return ids

    @contextmanager
    def _noting(self, messages: PlainMessages) -> Iterator[None]:
        try:
            yield
        except TokenizerError:
            self._prompts.refused = _copied(messages)
            raise


class WatchedRenderer:
    """A renderer that notes what agents' conversations are rendered from."""

    def __init__(self, renderer: Renderer, prompts: Prompts) -> None:
        self._renderer = renderer
        self._prompts = prompts

    @property
    def name(self) -> str:
        return self._renderer.name

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._renderer.stop_ids

    @property
    def markers(self) -> Markers:
        return self._renderer.markers

    def prompt_ids(self, messages: Messages, tools: Tools = (), arguments: Arguments = NO_ARGUMENTS) -> list[int]:
        """See ``Renderer.prompt_ids``."""
        ids = self._renderer.prompt_ids(messages, tools, arguments)
        self._prompts.add(
            Prompt(token_ids=tuple(ids), messages=_copied(messages), tools=tools, arguments=arguments, is_new=True)
        )
        return ids

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Messages,
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
    ) -> list[int] | None:
        """See ``Renderer.bridge``."""
        ids = self._renderer.bridge(prompt_ids, sampled_ids, messages, tools, arguments)
        if ids:
            whole = (*prompt_ids, *sampled_ids, *ids)
            self._prompts.add(
                Prompt(token_ids=whole, messages=_copied(messages), tools=tools, arguments=arguments, is_new=False)
            )
        return ids

    def call_opening(self, name: str, tools: Tools, arguments: Arguments = NO_ARGUMENTS) -> list[int] | None:
        """See ``Renderer.call_opening``."""
        opening = self._renderer.call_opening(name, tools, arguments)
        self._prompts.opens_with(opening or ())
        return opening

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Tools = (),
        arguments: Arguments = NO_ARGUMENTS,
        prompt_ids: Sequence[int] = (),
    ) -> Parsed:
        """See ``Renderer.parse``."""
        return self._renderer.parse(sampled_ids, tools, arguments, prompt_ids)

    def stream(self, stops: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> Stream:
        """See ``Renderer.stream``."""
        return self._renderer.stream(stops, prompt_ids)

    def text(self, sampled_ids: Sequence[int]) -> str:
        """See ``Renderer.text``."""
        return self._renderer.text(sampled_ids)


def _copied(messages: Messages | PlainMessages) -> list[Mapping[str, Any]]:
    """The messages as they are now: they belong to the user's code. A template also takes objects of other kinds."""
    return [dict(each) if isinstance(each, Mapping) else {"role": type(each).__name__, "content": each} for each in messages]
