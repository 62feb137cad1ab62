"""Asks an SGLang server for the log-probs of given tokens, over its HTTP API and given only its URL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.http_content import UNCOMPRESSED, TooMuchContentError, content_within
from gspo_services.shared.runtime.plain_text import without_passwords

K = TypeVar("K")
T = TypeVar("T")
AT_ONCE: Final = 16
"""Requests of one rank under way."""
RETRY_S: Final = 30.0
RETRY_EVERY_S: Final = 0.5
TEXTS_AT_ONCE: Final = 4096
SHOWN_CHARS: Final = 300
ANSWER_BYTES: Final = 2**20
TOKEN_BYTES: Final = 1024
"""Of one token in an answer, its text included; they come on top of ANSWER_BYTES."""
FLOAT32_LARGEST: Final = float(np.finfo(np.float32).max)
LARGEST_LOGPROB: Final = 0.01
"""No probability is above 1, but in a server's dtype its logarithm may be rounded to a little more than 0."""
SPARE_TOKENS: Final = 7
"""SGLang takes sequences that are at least so much shorter than its --context-length, and than its cache."""


class TeacherError(ServiceError):
    """The teacher scores nothing now, or not as a teacher must. No batch is to blame: nothing was trained of it yet, and the
    next learner asks again."""


class RefusedSequenceError(ServiceError):
    """The teacher is there, and does not score a sequence of this batch: it would not the next time either."""


class _Refused(TeacherError):
    """The server has answered that it will not."""


class _NotTaken(_Refused):
    """For what it was asked, such as a sequence that is too long, and not for what it is."""


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]
    """(log-prob, token id, text) of each token; the first has no log-prob."""


class _Scored(msgspec.Struct):
    meta_info: _Meta


class _Texts(msgspec.Struct):
    text: list[str]


class TeacherServer:
    """One server. Its methods block, and may be called from several threads."""

    def __init__(self, url: str, *, timeout_s: float, retry_s: float = RETRY_S) -> None:
        """``timeout_s`` bounds one answer, to its last byte; for ``retry_s`` a server that is away is asked again."""
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self.name = without_passwords(url)
        """Its URL, as it may be told."""

    def score(self, sequences: Mapping[K, Sequence[int]], into: dict[K, NDArray[np.float32]]) -> None:
        """For each sequence of L ids: log-probs of all but the first, at temperature 1, [L - 1]. SGLang misreports those of
        the vocabulary's highest id.

        Once one has failed, no other is begun. ``into`` then has all that were scored.
        Raises: TeacherError, also for a log-prob that is none in float32; RefusedSequenceError.
        """
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="teacher") as threads:
            scoring = {key: threads.submit(self._scored, ids) for key, ids in sequences.items()}
            try:
                wait(scoring.values(), return_when=FIRST_EXCEPTION)
            finally:
                begun = {key: future for key, future in scoring.items() if not future.cancel()}
        into |= {key: future.result() for key, future in begun.items() if future.exception() is None}
        for future in begun.values():
            future.result()

    def require_length(self, num_tokens: int) -> None:
        """Have a sequence of so many tokens scored: what SGLang takes depends on its memory, too.

        Raises: ValueError naming the length, what the server said and what to do; TeacherError.
        """
        try:
            self._rows([0] * num_tokens)
        except _NotTaken as error:
            raise ValueError(
                f"distillation.teacher: sequences may have {num_tokens} tokens (sampling.max_tokens, schedule.max_tokens), "
                f"and the server does not score so many ({error}): start it with --context-length of at least "
                f"{num_tokens + SPARE_TOKENS} and a cache of as many tokens (--mem-fraction-static), or lower "
                "sampling.max_tokens"
            ) from error

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself. Raises: TeacherError, also for a server without its tokenizer."""
        found: list[str] = []
        for begin in range(0, len(token_ids), TEXTS_AT_ONCE):
            some = [[token_id] for token_id in token_ids[begin : begin + TEXTS_AT_ONCE]]
            try:
                answer = self._post("/v1/detokenize", {"tokens": some, "skip_special_tokens": False}, _Texts, len(some)).text
            except _Refused as error:
                raise TeacherError(
                    f"the teacher at {self.name} does not say what its tokens are, which must be the policy's: start it "
                    f"with its tokenizer, without --skip-tokenizer-init ({error})"
                ) from error
            if len(answer) != len(some):
                raise TeacherError(f"the teacher at {self.name} gave {len(answer)} texts of {len(some)} tokens")
            found += answer
        return found

    def _scored(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        try:
            found = self._rows(token_ids)
        except _NotTaken as error:
            raise RefusedSequenceError(
                f"the teacher does not score a sequence of {len(token_ids)} tokens of this batch ({error}): see its log; "
                f"for the length it needs --context-length of at least {len(token_ids) + SPARE_TOKENS}"
            ) from error
        for place, (logprob, token_id, _) in enumerate(found[1:], start=1):
            # JSON has no infinity, but numbers that are infinite in float32.
            if logprob is None or not -FLOAT32_LARGEST <= logprob <= LARGEST_LOGPROB:
                raise TeacherError(
                    f"the teacher at {self.name} has log-prob {logprob} for token {place} of {len(found)} (id "
                    f"{token_id}): expected a number that is not above 0, and finite in float32; look at its weights and "
                    "its dtype"
                )
        return np.array([logprob for logprob, _, _ in found[1:]], dtype=np.float32)

    def _rows(self, token_ids: Sequence[int]) -> list[tuple[float | None, int, Any]]:
        body = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }
        found = self._post("/generate", body, _Scored, len(token_ids)).meta_info.input_token_logprobs
        asked = f"the teacher at {self.name} was asked for {len(token_ids)} tokens and scored"
        if len(found) < len(token_ids):
            raise _NotTaken(f"{asked} {len(found)}")  # So does --allow-auto-truncate.
        if [token_id for _, token_id, _ in found] != list(token_ids):
            raise TeacherError(f"{asked} others")
        return found

    def _post(self, path: str, body: dict[str, Any], kind: type[T], num_tokens: int) -> T:
        content = self._asked(path, msgspec.json.encode(body), ANSWER_BYTES + TOKEN_BYTES * num_tokens)
        try:
            return msgspec.json.decode(content, type=kind)
        # ValueError: also text that is not UTF-8.
        except (ValueError, RecursionError) as error:
            raise TeacherError(f"the teacher at {self.name}{path} did not answer as SGLang: {error}") from error

    def _asked(self, path: str, body: bytes, most: int) -> bytes:
        until = time.monotonic() + self._retry_s
        while True:
            try:
                status, content = asyncio.run(self._exchange(path, body, most))
            except TooMuchContentError as error:
                raise TeacherError(
                    f"the teacher at {self.name}{path} did not answer as SGLang: its answer {error}"
                ) from error
            except TimeoutError:
                trouble = f"does not answer within {self._timeout_s:g} s (distillation.timeout_s)"
            except (aiohttp.ClientError, OSError) as error:
                reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
                trouble = f"does not answer ({type(reason).__name__}: {reason})"
            else:
                if status == 200:
                    return content
                shown = content[:SHOWN_CHARS].decode(errors="replace")
                trouble = f"answered {status} to {path}: {shown}"
                if status < 500:
                    raise (_NotTaken if status == 400 else _Refused)(f"the teacher at {self.name} {trouble}")
            if time.monotonic() >= until:
                raise TeacherError(
                    f"the teacher at {self.name} {trouble}. Start it, or name another in distillation.teacher; no step of "
                    "this batch was made, and the next start asks again"
                )
            time.sleep(RETRY_EVERY_S)

    async def _exchange(self, path: str, body: bytes, most: int) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **UNCOMPRESSED}
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.post(self._url + path, data=body, headers=headers, allow_redirects=False) as response,
        ):
            return response.status, await content_within(response, most)


def require_same_texts(server: TeacherServer, model_dir: Path) -> None:
    """Compare each of the policy's tokens with the server's. White space does not count: decoders treat it differently.

    Raises: ValueError naming the first token that is another there; TeacherError.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ours = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    theirs = server.texts(ours)
    for token_id, text in zip(ours, theirs, strict=True):
        own = tokenizer.decode([token_id], skip_special_tokens=False)
        if "".join(own.split()) != "".join(text.split()):
            raise ValueError(
                f"distillation.teacher: of the policy's {len(ours)} tokens, the first that the server does not have has id "
                f"{token_id}: {text[:50]!r} there, {own[:50]!r} here. Serve a teacher with the policy's tokenizer"
            )
