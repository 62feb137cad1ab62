"""Samples of clients on one SGLang server, which has the adapters that are asked for.

Samples change nothing, so they are not durable: after a restart of the service a client is told 410, and asks again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from gspo_services.rollout.sglang import (
    EngineError,
    EngineHttp,
    EngineRefused,
    OutputDecoder,
    RequestRefused,
    SamplingParameters,
    generate_fields,
    scoring_fields,
)
from gspo_services.serve.calls import SampleCall, SampleRules, UserError
from gspo_services.serve.wire import Sampled, sample_answer

_PIECE: Final = 8
"""Tokens between two looks for a text that ends a sample."""
_MAX_SAMPLES: Final = 1024
_MAX_TOPK: Final = 64
_Entry = tuple[float | None, int, Any]
Topk = tuple[NDArray[np.int32], NDArray[np.float32]]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Entry] = []
    input_top_logprobs: list[list[_Entry] | None] = []
    output_top_logprobs: list[list[_Entry] | None] = []


class _Scored(msgspec.Struct):
    meta_info: _Meta


class ModelTexts(Protocol):
    """The model's tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Loads(Protocol):
    """``gspo_services.rollout.sglang.Engine.adapters``."""

    async def load(self, name: str, path: Path) -> None: ...
    async def unload(self, name: str) -> None: ...


class AdapterSlots:
    """The adapters that the server has, of all that were saved: those used last."""

    def __init__(self, adapters: Loads, most: int) -> None:
        self._adapters, self._most = adapters, most
        self._names: dict[Path, str] = {}
        """Least recently used first. A name is never used again: SGLang would load its old files."""
        self._uses: dict[Path, int] = {}
        self._num_loads = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def using(self, directory: Path) -> AsyncIterator[str]:
        """Have the adapter of ``directory`` on the server inside; yields its name there. Raises: EngineError."""
        async with self._changed:
            while directory not in self._names and len(self._names) >= self._most:
                idle = next((each for each in self._names if not self._uses[each]), None)
                if idle is None:
                    await self._changed.wait()
                    continue
                await self._adapters.unload(self._names.pop(idle))
            if directory not in self._names:
                self._num_loads += 1
                name = f"client-{self._num_loads}"
                await self._adapters.load(name, directory)
                self._names[directory] = name
            name = self._names[directory] = self._names.pop(directory)
            self._uses[directory] = self._uses.get(directory, 0) + 1
        try:
            yield name
        finally:
            async with self._changed:
                self._uses[directory] -= 1
                self._changed.notify_all()


class Sampler:
    """Answers samples. Use inside the engine's context."""

    def __init__(self, http: EngineHttp, slots: AdapterSlots, texts: ModelTexts, *, longest: int, max_running: int) -> None:
        """``longest``: tokens of a prompt with its answer. ``max_running``: requests that the server gets at a time."""
        self._http, self._slots, self._texts, self._longest = http, slots, texts, longest
        self._running = asyncio.Semaphore(max_running)
        self._num_requests = 0

    async def sample(self, call: SampleCall, directory: Path | None) -> bytes:
        """Answer a call with the adapter of ``directory``; None: the base model alone. Raises: UserError, EngineError."""
        self._require(call)
        if directory is None:
            return await self._answer(call, None)
        async with self._slots.using(directory) as name:
            return await self._answer(call, name)

    def _require(self, call: SampleCall) -> None:
        prompt, rules = call.prompt_tokens, call.sampling_params
        if any(chunk.type != "encoded_text" for chunk in call.prompt.chunks):
            raise UserError("prompt has a chunk that is no text; this service samples from tokens alone")
        if not 1 <= len(prompt) < self._longest:
            raise UserError(f"prompt has {len(prompt)} tokens; it must have 1 to {self._longest - 1}")
        wrong = [token for token in prompt if not 0 <= token < self._texts.vocab_size]
        if wrong:
            raise UserError(f"prompt holds {wrong[0]}; the model's tokens are 0 to {self._texts.vocab_size - 1}")
        if not 1 <= call.num_samples <= _MAX_SAMPLES:
            raise UserError(f"num_samples is {call.num_samples}; ask for 1 to {_MAX_SAMPLES}")
        if rules.max_tokens is not None and not 1 <= rules.max_tokens <= self._longest - len(prompt):
            most = self._longest - len(prompt)
            raise UserError(f"sampling_params: max_tokens is {rules.max_tokens}; behind this prompt 1 to {most} fit")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(call, name) <= min(_MAX_TOPK, self._texts.vocab_size):
                raise UserError(f"{name} is {getattr(call, name)}; ask for 0 to {_MAX_TOPK}")
        last = call.prompt_logprobs_last_n
        if last is not None and not 1 <= last < len(prompt):
            raise UserError(f"prompt_logprobs_last_n is {last}; it must be 1 to {len(prompt) - 1}")
        if call.target_prompt_logprobs is not None or call.prompt_alt_tokens_k:
            raise UserError("target_prompt_logprobs and prompt_alt_tokens_k are not served here; leave them out")

    async def _answer(self, call: SampleCall, adapter: str | None) -> bytes:
        prompt = call.prompt_tokens
        async with asyncio.TaskGroup() as tasks:
            scored = None
            if call.prompt_logprobs or call.topk_prompt_logprobs:
                scored = tasks.create_task(self._score(prompt, call.topk_prompt_logprobs, adapter))
            samples = [tasks.create_task(self._one(call, index, adapter)) for index in range(call.num_samples)]
        if scored is None:
            return sample_answer([each.result() for each in samples])
        logprobs, topk = scored.result()
        if call.prompt_logprobs_last_n is not None:
            logprobs[: -call.prompt_logprobs_last_n] = np.nan
        return sample_answer(
            [each.result() for each in samples],
            logprobs if call.prompt_logprobs else None,
            topk if call.topk_prompt_logprobs else None,
        )

    async def _one(self, call: SampleCall, index: int, adapter: str | None) -> Sampled:
        rules, prompt = call.sampling_params, call.prompt_tokens
        texts, tokens = _stops(rules)
        try:
            sampling = SamplingParameters(
                max_new_tokens=self._longest - len(prompt) if rules.max_tokens is None else rules.max_tokens,
                temperature=rules.temperature,
                top_p=rules.top_p,
                top_k=rules.top_k,
                stop_token_ids=tokens,
                ignore_eos=rules.stop == [],
                # Samples of one call differ. A server in deterministic mode has a seed of its own, the same for all.
                seed=secrets.randbits(62) if rules.seed is None else (rules.seed + index) % 2**63,
            )
        except ValueError as error:
            raise UserError(f"sampling_params: {error}") from error
        self._num_requests += 1
        fields = generate_fields(f"client-{self._num_requests};", prompt, sampling, bool(texts), _PIECE, adapter)
        if call.topk_sample_logprobs:
            fields["top_logprobs_num"] = call.topk_sample_logprobs
        async with self._running:
            return await self._generate(fields, texts, call.topk_sample_logprobs)

    async def _generate(self, fields: dict[str, Any], texts: Sequence[str], k: int) -> Sampled:
        decoder = OutputDecoder(incremental=True)
        ids: list[int] = []
        logprobs: list[float] = []
        topk: list[list[_Entry] | None] = []
        async with aclosing(self._http.answers(msgspec.json.encode(fields), stream=bool(texts))) as payloads:
            async for payload in payloads:
                try:
                    output = decoder.decode(payload)
                except RequestRefused as error:
                    raise UserError(str(error)) from error
                except ValueError as error:
                    raise EngineError(str(error)) from error
                ids += output.token_ids.tolist()
                logprobs += output.logprobs.tolist()
                if k:
                    topk += msgspec.json.decode(payload, type=_Scored).meta_info.output_top_logprobs
                end = self._end(ids, texts)
                if end is not None:
                    # Leaving closes the connection, and the server ends the request.
                    return _sampled(ids[:end], logprobs[:end], topk[:end], k, stopped=True)
                if output.finish_reason == "abort":
                    raise EngineError("the server ended the request")
                if output.finish_reason is not None:
                    return _sampled(ids, logprobs, topk, k, stopped=output.finish_reason == "stop")
        raise EngineError("the server closed the stream before its end")

    def _end(self, ids: Sequence[int], texts: Sequence[str]) -> int | None:
        """The number of tokens after which one of the texts is there; None: none of them is."""
        if not texts or not any(text in self._texts.decode(ids) for text in texts):
            return None
        return next(n for n in range(1, len(ids) + 1) if any(text in self._texts.decode(ids[:n]) for text in texts))

    async def _score(self, prompt: Sequence[int], k: int, adapter: str | None) -> tuple[NDArray[np.float32], Topk]:
        """Log-probs of a prompt's tokens at temperature 1, NaN for the first, and the k likeliest at each place."""
        body = {**scoring_fields(prompt, adapter=adapter or ""), "top_logprobs_num": k}
        async with self._running:
            async with aclosing(self._http.answers(msgspec.json.encode(body), stream=False)) as payloads:
                meta = msgspec.json.decode(await anext(payloads), type=_Scored).meta_info
        if [token for _, token, _ in meta.input_token_logprobs] != list(prompt):
            raise EngineError("the server scored other tokens than the prompt's")
        logprobs = [np.nan if each is None else each for each, _, _ in meta.input_token_logprobs]
        logprobs[0] = np.nan
        return np.array(logprobs, dtype=np.float32), _topk(meta.input_top_logprobs, k)


def _stops(rules: SampleRules) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts and the tokens that end a sample."""
    given = [rules.stop] if isinstance(rules.stop, str) else rules.stop or []
    texts = tuple(each for each in given if isinstance(each, str))
    if "" in texts:
        raise UserError("sampling_params: stop holds an empty text, which would end every sample at once")
    return texts, tuple(each for each in given if isinstance(each, int))


def _sampled(
    ids: Sequence[int], logprobs: Sequence[float], topk: Sequence[list[_Entry] | None], k: int, *, stopped: bool
) -> Sampled:
    return Sampled(
        tokens=np.array(ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        stopped=stopped,
        topk=_topk(topk, k) if k else None,
    )


def _topk(entries: Sequence[list[_Entry] | None], k: int) -> Topk:
    """Ids and log-probs [n, k]; -1 and NaN where there are none."""
    ids = np.full((len(entries), k), -1, dtype=np.int32)
    logprobs = np.full((len(entries), k), np.nan, dtype=np.float32)
    for place, each in enumerate(entries):
        for column, (logprob, token, _) in enumerate((each or [])[:k]):
            ids[place, column], logprobs[place, column] = token, np.nan if logprob is None else logprob
    return ids, logprobs


REFUSALS: Final = (UserError, EngineRefused)
"""What is the matter of whoever asked."""
