"""The judge that reward functions ask."""

from __future__ import annotations

import itertools
import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio.lowlevel
import anyio.to_thread
import openai
from openai.types.chat import ChatCompletion

from gspo.tasks.judge.answer_files import AnswerFiles, digest_of
from gspo.tasks.judge.connection import JudgeConnection, JudgeError, has_choices, shown

_MOST_PLACES: Final = 1024
_NUMBERS: Final = itertools.count()
_Connections = anyio.lowlevel.RunVar[JudgeConnection | None]


def _connections() -> _Connections:
    # An event loop keeps them by name.
    return anyio.lowlevel.RunVar(f"gspo-judge-{next(_NUMBERS)}", None)


@dataclass(eq=False)
class Judge:
    """A model behind an OpenAI-compatible API, asked from async reward functions; one for all calls of a module.

    It needs ``reward.network``; a folder needs ``reward.scratch``; a key from the environment needs ``reward.variables``.
    Raises: ValueError for a field that is out of range.
    """

    model: str
    _: KW_ONLY
    base_url: str | None = None
    """None: OPENAI_BASE_URL, or OpenAI's own."""
    api_key: str | None = None
    """None: OPENAI_API_KEY."""
    folder: str | Path | None = None
    """Shared state of this machine's reward workers: answers, and the use of the limits. A relative path begins at
    the rollout's working directory. Files in it may be deleted at any time."""
    cache: bool = True
    """Keep answers in ``folder``, so that the same request is paid only once, even across runs."""
    requests_per_minute: float | None = None
    """The most requests, evenly spaced, of all workers that name the same folder, model and base_url. A retry is a request,
    and a Retry-After holds for all. None: no limit."""
    concurrency: int | None = None
    """The most requests at a time, likewise."""
    timeout_s: float = 60.0
    """Seconds of silence after which a try fails."""
    max_retries: int = 6
    """Further tries after 408, 409, 429, 5xx, silence and broken connections. The pauses are random and grow from half a
    second to 8 s, or are what Retry-After says, up to 60 s. The deadline of the reward ends them all."""
    _connections: _Connections = field(default_factory=_connections, init=False, repr=False)
    """One for each event loop, because sockets belong to theirs."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("the model of a judge is empty: name one")
        if self.requests_per_minute is not None and not 0 < self.requests_per_minute < math.inf:
            raise ValueError(f"requests_per_minute of a judge is {self.requests_per_minute}: expected a number above 0")
        if self.concurrency is not None and not 1 <= self.concurrency <= _MOST_PLACES:
            raise ValueError(f"concurrency of a judge is {self.concurrency}: expected 1 to {_MOST_PLACES}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s of a judge is {self.timeout_s}: expected seconds, above 0")
        if self.max_retries < 0:
            raise ValueError(f"max_retries of a judge is {self.max_retries}: expected at least 0")
        if self.folder is None and (self.requests_per_minute is not None or self.concurrency is not None):
            raise ValueError("all workers share a judge's limits through a folder: give folder")

    async def ask(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """Return the text of the answer to a conversation; ``parameters`` as in ``complete``.

        Raises: JudgeError, also for an answer without text; ValueError as ``complete`` does.
        """
        answer = await self._answer(messages, parameters)
        choice = answer["choices"][0]
        message = choice.get("message") if isinstance(choice, dict) else None
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise JudgeError(f"{self.model} answered without text: {shown(choice)}")
        return text

    async def complete(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> ChatCompletion:
        """Return the whole answer, such as with ``logprobs=True``; ``parameters`` are those of chat.completions.create.

        The same request has the same answer from the cache, at any temperature; another ``seed`` makes it another request.
        Raises: JudgeError; ValueError for parameters that are not JSON, and for a stream.
        """
        return ChatCompletion.construct(None, **await self._answer(messages, parameters))

    async def aclose(self) -> None:
        """Close the connections of this event loop. Reward functions need not: the loop of a worker ends with it."""
        connection = self._connections.get()
        if connection is not None:
            self._connections.set(None)
            await connection.close()

    async def _answer(self, messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]) -> dict[str, Any]:
        if parameters.get("stream"):
            raise ValueError("a judge does not stream its answers: leave out stream")
        request = {"model": self.model, "messages": [dict(message) for message in messages], **parameters}
        try:
            connection = self._connection()
            if self.folder is None or not self.cache:
                return await connection.ask(request)
            answers = AnswerFiles(Path(self.folder) / "answers")
            digest = digest_of({"base_url": connection.base_url, **request})
            kept = await anyio.to_thread.run_sync(answers.get, digest)
            if kept is not None and has_choices(kept):
                return kept
            answer = await connection.ask(request)
            await anyio.to_thread.run_sync(answers.put, digest, answer)
        except OSError as error:
            raise JudgeError(f"the judge's folder {self.folder} cannot be used: {error}") from error
        return answer

    def _connection(self) -> JudgeConnection:
        connection = self._connections.get()
        if connection is None:
            if self.api_key is None and not os.environ.get("OPENAI_API_KEY"):
                raise JudgeError(
                    "the judge has no key: set OPENAI_API_KEY where the rollout is started and name it in reward.variables; "
                    'for a server that needs none, give any text, such as api_key="none"'
                )
            if self.folder is not None:
                _require_writable(Path(self.folder))
            try:
                connection = JudgeConnection(self.model, self.timeout_s, self.max_retries, self.base_url, self.api_key)
            except openai.OpenAIError as error:
                raise JudgeError(f"the judge cannot be asked: {error}") from error
            if self.folder is not None:
                connection.limit(Path(self.folder), self.requests_per_minute, self.concurrency)
            self._connections.set(connection)
        return connection


def _require_writable(folder: Path) -> None:
    """Raises: JudgeError, OSError."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 0:
        raise JudgeError(f"the judge's folder {folder} cannot be written to: set reward.scratch = true")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise JudgeError(f"the judge's folder {folder} may not be written to by this user")
