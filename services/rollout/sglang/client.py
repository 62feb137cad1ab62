"""Client of one SGLang server, over its HTTP API and given only its URL.

Weight updates. `pause("retract")`, `update_weights_from_disk`, `resume` is the sequence, and retract is the default
because of what it guarantees: SGLang puts every running request back into its queue, drops their keys and values, loads,
flushes the prefix cache (refused unless nothing is in place, and then the update fails loudly), and computes
keys and values again under the new weights. So each later token's log-prob equals a clean forward of prompt and tokens
under the weights of that token's version. With "in_place" keys and values of the old weights stay: later
log-probs are those of no model at all, and the cache cannot be flushed.

A failed update leaves weights that nobody knows (SGLang's rollback reads the same directory again): `generate` refuses
until an update has succeeded.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
import structlog

from services.rollout.sglang.answers import Checksums, ModelInfo, PromptAnswer, ServerInfo
from services.rollout.sglang.generation import (
    FinishReason,
    GenerateRequest,
    OutputDecoder,
    OutputPiece,
    RequestRefused,
    SamplingParameters,
    VersionTagger,
    parse_version,
)
from services.rollout.sglang.http import EngineError, EngineHttp, EngineRefused, EngineUnreachable, decode_answer

log = structlog.get_logger()

__all__ = ["Engine", "EngineError", "EngineRefused", "EngineUnreachable", "PauseMode", "ServerInfo"]

PauseMode = Literal["retract", "in_place"]
_HEALTH_TIMEOUT_S: Final = 25.0
"""SGLang's own health check gives up after 20 s."""
_ABORT_RETRY_S: Final = 0.25
_NO_WEIGHTS: Final = "a weight update failed, so nobody knows the engine's weights: load a version before generating"


class _Live:
    """A request under way: its name at the server, and what was asked of it."""

    def __init__(self) -> None:
        self.server_rid: str | None = None
        self.abort_asked = False
        self.cut = False
        self.ended = asyncio.Event()


class Engine:
    """One SGLang server. Use as a context manager; all methods may be called concurrently.

    One engine object per server does all of its weight updates: token versions are told apart by them.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int | None = None,
        chunk_tokens: int = 64,
        max_concurrency: int = 256,
        hold_limit_tokens: int = 1024,
        timeout_s: float = 30.0,
        load_timeout_s: float = 600.0,
        stall_timeout_s: float = 300.0,
    ) -> None:
        """`vocab_size` guards the server: it dies of a token id outside its vocabulary. None leaves it unguarded.

        `chunk_tokens` is the least size of a piece that is not the last; answers that fit in one piece are not streamed.
        `hold_limit_tokens` bounds the tokens held back after an update, `stall_timeout_s` the wait for the next piece,
        pauses included.
        """
        if chunk_tokens < 1 or max_concurrency < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}, max_concurrency {max_concurrency}: both must be at least 1")
        if hold_limit_tokens < chunk_tokens:
            raise ValueError(f"hold_limit_tokens is {hold_limit_tokens}, less than one piece of {chunk_tokens}")
        self.url = url
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._hold_limit_tokens = hold_limit_tokens
        self._load_timeout_s = load_timeout_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self._http = EngineHttp(url, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s)
        self._info: ServerInfo | None = None
        self._live: dict[str, _Live] = {}
        self._num_requests = 0
        self._session = secrets.token_hex(4)
        # Odd while an update is under way: two equal even values mean that none fell between.
        self._update_marks = 0
        self._update_ended = asyncio.Event()
        self._update_ended.set()
        self._weights_unknown = False
        self._paused_mode: PauseMode | None = None

    async def __aenter__(self) -> Self:
        """Raises: EngineUnreachable, EngineError."""
        try:
            self._info = await self.server_info()
        except BaseException:
            await self._http.aclose()
            raise
        if not self._info.enable_deterministic_inference:
            log.info("engine_ignores_seeds", url=self.url, remedy="start it with --enable-deterministic-inference")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    # Generation ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """Sample one completion; the last piece, and only that, has a finish reason.

        Close the iterator (or cancel) to give up: the server notices within 4 s; `abort` is immediate.
        Raises: ValueError for a request that cannot be served, EngineRefused, EngineUnreachable, EngineError.
        """
        self._check(request)
        live = self._live[request.rid] = _Live()
        try:
            async with self._slots:
                input_ids = [int(token) for token in request.input_ids]
                sampling = request.sampling
                finished = False
                while not finished:
                    given: list[int] = []
                    async with aclosing(self._answer_pieces(request.rid, live, input_ids, sampling)) as pieces:
                        async for piece in pieces:
                            given += piece.token_ids.tolist()
                            reason = _true_reason(piece.finish_reason, given, sampling)
                            if reason == "abort" and live.cut and not live.abort_asked:
                                reason = None
                            finished = reason is not None
                            if given or finished:
                                yield msgspec.structs.replace(piece, finish_reason=reason)
                    if not finished:
                        input_ids += given
                        sampling = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(given))
        finally:
            del self._live[request.rid]
            live.ended.set()

    async def _answer_pieces(
        self, rid: str, live: _Live, input_ids: list[int], sampling: SamplingParameters
    ) -> AsyncGenerator[OutputPiece, None]:
        """One HTTP request, cut short (`live.cut`) when too many tokens are held because their version is not known yet."""
        self._num_requests += 1
        # SGLang aborts every request whose id *begins* with the one given, hence the ';'. And 2 s after a stream has ended
        # it aborts that id once more, whoever uses it by then: an id is never used twice, nor by another engine object.
        server_rid = live.server_rid = f"{rid}#{self._session}-{self._num_requests};"
        stream = sampling.max_new_tokens > self._chunk_tokens
        body = _generate_body(server_rid, input_ids, sampling, stream, self._chunk_tokens)
        decoder = OutputDecoder(incremental=self._server.incremental_streaming_output)
        tagger = VersionTagger(self._chunk_tokens)
        mark, live.cut = self._update_marks, False
        async with aclosing(self._http.answers(body, stream=stream)) as payloads:
            async for payload in payloads:
                # What left the server before an update arrives during it: it is good if the update turns out well.
                await self._update_ended.wait()
                if self._weights_unknown:
                    raise EngineError(_NO_WEIGHTS)
                try:
                    output = decoder.decode(payload)
                except RequestRefused as error:
                    raise EngineRefused(f"request {rid}: {error}") from error
                except (ValueError, msgspec.MsgspecError) as error:
                    raise EngineError(f"request {rid}: {error}: {payload[:300]!r}") from error
                piece = tagger.push(output, settled=mark == self._update_marks and mark % 2 == 0)
                if piece is not None:
                    yield piece
                elif tagger.num_held > self._hold_limit_tokens and not live.cut:
                    live.cut = True
                    await self._send_abort(server_rid)
                if output.finish_reason is not None:
                    return
        raise EngineUnreachable(f"request {rid}: the engine closed the stream before its end")

    async def abort(self, rid: str, *, timeout_s: float = 5.0) -> bool:
        """End a request; its stream then delivers what was generated and finish reason "abort".

        Returns whether the stream ended in time; False too when no such request is under way. The server forgets an
        abort of a request that it has not read yet, so it is sent again until the stream ends.
        """
        live = self._live.get(rid)
        if live is None:
            return False
        live.abort_asked = True
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if live.server_rid is not None:
                        await self._send_abort(live.server_rid)
                    try:
                        async with asyncio.timeout(_ABORT_RETRY_S):
                            await live.ended.wait()
                        return True
                    except TimeoutError:
                        continue
        except TimeoutError:
            return False

    async def abort_all(self) -> None:
        """End every request of the server, also those of other clients."""
        for live in self._live.values():
            live.abort_asked = True
        await self._http.post("/abort_request", {"abort_all": True})

    async def prompt_logprobs(self, input_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Log-probs at temperature 1 of input_ids[1:] given what precedes each, float32 [T - 1]: a probe of the weights.

        SGLang misreports the highest id of the vocabulary here; keep it out of the probe.
        """
        self._check_ids("prompt_logprobs", input_ids)
        body = {
            "input_ids": [int(token) for token in input_ids],
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }
        answer = decode_answer(await self._http.post("/generate", body), PromptAnswer)
        logprobs = [logprob for logprob, _, _ in answer.meta_info.input_token_logprobs[1:]]
        if len(logprobs) != len(input_ids) - 1 or None in logprobs:
            raise EngineError(f"/generate: {len(input_ids) - 1} prompt log-probs expected, got {logprobs[:10]}")
        return np.array(logprobs, dtype=np.float32)

    # Weights -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop decoding; new requests wait at the server. The module's docstring says what the modes mean."""
        await self._http.post("/pause_generation", {"mode": mode})
        self._paused_mode = mode

    async def resume(self) -> None:
        """Go on decoding after `pause`."""
        await self._http.post("/continue_generation", {})
        self._paused_mode = None

    async def update_weights_from_disk(
        self,
        path: Path,
        version: int,
        *,
        flush_cache: bool | None = None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Load the *.safetensors of `path` (nothing else is needed there) and make `version` the server's version.

        A tensor that is not in the directory keeps its value, and a name that the server does not know is **skipped in
        silence**: verify. While paused it happens at once; otherwise after the requests under
        way have ended. `flush_cache` None: flush, except while paused in place, where it is impossible and old cache
        entries go on being used. `check` is called when the weights are there, and the update fails with what it raises.
        Raises: EngineError, after which `generate` refuses until an update succeeds.
        """
        body = {
            "model_path": str(path),
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": self._paused_mode != "in_place" if flush_cache is None else flush_cache,
        }
        async with self.updating(version, check) as http:
            await http.post("/update_weights_from_disk", body, timeout_s=self._load_timeout_s)

    @asynccontextmanager
    async def updating(self, version: int, check: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[EngineHttp]:
        """Inside, the server is given ``version`` by calls of the caller's own; afterwards it must say that it serves it.

        ``check``: made then, too, at the same time: generation stands still meanwhile.
        Raises: EngineError, after which `generate` refuses until an update succeeds.
        """
        if version < 0:
            raise ValueError(f"version is {version}, must not be negative")
        self._update_marks += 1
        self._weights_unknown = True
        self._update_ended.clear()
        try:
            yield self._http
            served, _ = await asyncio.gather(self.weight_version(), _nothing() if check is None else check())
            if served != version:
                raise EngineError(f"version {version} was loaded, but the server says that it serves {served}")
            self._weights_unknown = False
        finally:
            self._update_marks += 1
            self._update_ended.set()

    async def control(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        """One of SGLang's calls that have no method here. Raises: EngineError."""
        await self._http.post(path, body, timeout_s=timeout_s)

    async def weights_checksums(self) -> dict[str, str]:
        """Checksum of each of the server's parameters, by SGLang's own names; works while paused.

        Raises: EngineError, also for a server of several ranks: their shards have no common checksum.
        """
        content = await self._http.post("/weights_checker", {"action": "checksum"}, timeout_s=self._load_timeout_s)
        answer = decode_answer(content, Checksums)
        if len(answer.ranks) != 1:
            raise EngineError(f"checksums of {len(answer.ranks)} ranks, only a server of one rank can be compared")
        return answer.ranks[0].checksums

    async def weight_version(self) -> int | None:
        """The version that the server says it serves; None when it was started without a number as --weight-version."""
        text = (await self._http.get("/model_info", ModelInfo)).weight_version
        try:
            return parse_version(text)
        except ValueError:
            return None

    async def flush_cache(self) -> None:
        """Empty the prefix cache. Raises: EngineError while requests are under way (unless paused by "retract")."""
        await self._http.post("/flush_cache", {})

    # State ---------------------------------------------------------------------------------------------------------

    async def server_info(self) -> ServerInfo:
        return await self._http.get("/server_info", ServerInfo)

    async def health(self) -> bool:
        """Whether the server generates: it makes one token, which takes 1 s, and fails while paused.

        Raises: EngineUnreachable when nothing listens.
        """
        return await self._http.status("/health", timeout_s=_HEALTH_TIMEOUT_S) == HTTPStatus.OK

    @property
    def _server(self) -> ServerInfo:
        if self._info is None:
            raise EngineError("the engine is not open: use it as `async with Engine(url) as engine`")
        return self._info

    # Checks --------------------------------------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        if self._weights_unknown and self._update_ended.is_set():
            raise EngineError(_NO_WEIGHTS)
        if request.rid in self._live:
            raise ValueError(f"request {request.rid} is under way already: abort it, or use another rid")
        self._check_ids(f"request {request.rid}", request.input_ids)

    def _check_ids(self, what: str, input_ids: Sequence[int] | np.ndarray[Any, Any]) -> None:
        lowest, highest = min(input_ids), max(input_ids)
        if lowest < 0 or (self._vocab_size is not None and highest >= self._vocab_size):
            raise ValueError(
                f"{what}: token ids go from {lowest} to {highest}, the vocabulary has {self._vocab_size}: "
                f"the server would die of it"
            )

    async def _send_abort(self, server_rid: str) -> None:
        await self._http.post("/abort_request", {"rid": server_rid})


async def _nothing() -> None:
    """No check."""


def _generate_body(
    server_rid: str, input_ids: list[int], sampling: SamplingParameters, stream: bool, chunk_tokens: int
) -> bytes:
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
        "stream_interval": chunk_tokens,
    }
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return msgspec.json.encode(
        {
            "rid": server_rid,
            "input_ids": input_ids,
            "stream": stream,
            "return_logprob": True,
            "sampling_params": parameters,
        }
    )


def _true_reason(reason: FinishReason | None, given: list[int], sampling: SamplingParameters) -> FinishReason | None:
    """SGLang lets an abort hide a stop token or the length limit that was reached in the same step.

    Going on after such an end would continue behind the stop token.
    """
    if reason == "abort" and given:
        if given[-1] in sampling.stop_token_ids:
            return "stop"
        if len(given) >= sampling.max_new_tokens:
            return "length"
    return reason
