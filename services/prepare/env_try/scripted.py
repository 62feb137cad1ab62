"""Answers without a model: an echo, a fixed text, or what a person types."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final, Literal

import numpy as np

from gspo_protocol.messages import VersionRun
from gspo_services.prepare.env_try.prompts import Prompt, Prompts
from gspo_services.rollout.sglang import EngineError, GenerateRequest, OutputPiece
from gspo_services.rollout.tokenizer import SENTINEL, ChatTokenizer, TokenizerError
from gspo_services.runs.local_play import VERSION

Answering = Callable[[Prompt | None], Awaitable[str]]
"""The text of the next answer. Raises: EngineError when there is none."""
GOES_ON: Final = "\\"
"""At the end of a typed line: the answer has another line."""


class TextEngine:
    """A ``PolicyEngine`` whose answers are texts, which it is certain of: their log-probs are 0."""

    def __init__(self, tokenizer: ChatTokenizer, prompts: Prompts, answering: Answering) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._answering = answering
        self._stop_id = stop_id_of(tokenizer)

    async def stop_generating(self) -> None:
        """An answer is made at once, so none is under way."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """See ``Engine.generate``."""
        ids = self._tokenizer.encode(await self._answering(self._prompts.found(request.input_ids)))
        # As an engine does, end at the first token that ends a turn, or with the last that there is room for.
        end = next((place for place, token in enumerate(ids) if token in request.sampling.stop_token_ids), len(ids))
        whole = [*ids[:end], self._stop_id if end == len(ids) else ids[end]]
        kept = whole[: request.sampling.max_new_tokens]
        end_reason: Literal["stop", "length"] = "stop" if len(kept) == len(whole) else "length"
        for place, token in enumerate(kept):
            # One by one, because an agent's stop string may end the answer at any token.
            yield OutputPiece(
                token_ids=np.array([token], dtype=np.int32),
                logprobs=np.zeros(1, dtype=np.float32),
                version_runs=[VersionRun(VERSION, 1)],
                finish_reason=end_reason if place == len(kept) - 1 else None,
            )


def stop_id_of(tokenizer: ChatTokenizer) -> int:
    """The token with which the chat template ends an assistant's turn."""
    user = {"role": "user", "content": "."}
    try:
        text = tokenizer.render([user, {"role": "assistant", "content": SENTINEL}, user])
    except TokenizerError:
        text = ""
    written = [token for token in tokenizer.encode(text.partition(SENTINEL)[2]) if token in tokenizer.stop_ids]
    return written[0] if written else min(tokenizer.stop_ids)


async def echo(prompt: Prompt | None) -> str:
    """The last message of the prompt."""
    content = prompt.messages[-1].get("content") if prompt is not None and prompt.messages else None
    return "" if content is None else str(content)


def fixed(text: str) -> Answering:
    """Always ``text``."""

    async def answering(prompt: Prompt | None) -> str:
        return text

    return answering


class TypedAnswers:
    """Answers that a person types, a line each; a backslash at the end of a line goes on with the next one."""

    def __init__(self, descriptor: int, ask: Callable[[str], None]) -> None:
        """``descriptor``: where the lines come from. ``ask`` shows what is to be typed next."""
        self._descriptor = descriptor
        self._ask = ask
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._reading: threading.Thread | None = None
        self._alone = asyncio.Lock()

    async def answer(self, prompt: Prompt | None) -> str:
        """The next answer. Raises: EngineError at the end of the input."""
        # Side by side, two calls would take each other's lines.
        async with self._alone:
            self._ask("assistant> ")
            typed = await self._line()
            while typed.endswith(GOES_ON):
                self._ask("> ")
                typed = f"{typed.removesuffix(GOES_ON)}\n{await self._line()}"
            return typed

    async def _line(self) -> str:
        if self._reading is None:
            loop = asyncio.get_running_loop()
            # A daemon: when the command ends it may wait for a line that never comes.
            self._reading = threading.Thread(target=self._read, args=(loop,), name="typed-answers", daemon=True)
            self._reading.start()
        line = await self._lines.get()
        if line is None:
            self._lines.put_nowait(None)
            raise EngineError("standard input has ended: --type needs a line for each answer")
        return line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not through sys.stdin: Python aborts when it ends while a thread waits inside of it.
        rest = b""
        while content := os.read(self._descriptor, 65_536):
            *lines, rest = (rest + content).split(b"\n")
            self._give(loop, [line.decode(errors="replace") for line in lines])
        self._give(loop, [rest.decode(errors="replace"), None] if rest else [None])

    def _give(self, loop: asyncio.AbstractEventLoop, lines: Sequence[str | None]) -> None:
        # The loop may be closed: then nobody waits for these lines.
        with contextlib.suppress(RuntimeError):
            for line in lines:
                loop.call_soon_threadsafe(self._lines.put_nowait, line)
