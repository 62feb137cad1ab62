"""Client of one SGLang server, over its HTTP API and given only its URL.

A weight update is ``pause("retract")``, ``update_weights_from_disk``, ``resume``. Retract is the default because of what it
guarantees. SGLang puts every running request back into its queue and drops their keys and values. It loads, and flushes the
prefix cache; a flush that it refuses fails the update. Then it computes keys and values again under the new weights. So the
log-prob of each later token equals a clean forward of prompt and tokens under the weights of that token's version. With
"in_place" the keys and values of the old weights stay: later log-probs belong to no model at all, and the cache cannot be
flushed.

With adapters (``gspo_services.rollout.sglang.engine_adapters``) nothing pauses: each request keeps the adapter that it began
with, and
``cut`` ends it early, so that the rest is sampled with the one that new requests get (``serve``). Keys and values are then
computed again, as with retract.

A failed update leaves unknown weights (SGLang's rollback reads the same directory again), so ``generate`` refuses until an
update has succeeded.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
import structlog

from gspo_protocol.messages import Probe
from gspo_protocol.probes import probe_spans, probe_tokens
from gspo_services.rollout.sglang.engine_adapters import Adapter, EngineAdapters, OpenRequest
from gspo_services.rollout.sglang.generation import (
    GenerateRequest,
    OutputDecoder,
    OutputPiece,
    RequestRefused,
    SamplingParameters,
    VersionTagger,
    generate_fields,
    parse_version,
    true_reason,
)
from gspo_services.rollout.sglang.http import EngineError, EngineHttp, EngineRefused, EngineUnreachable, decode_answer
from gspo_services.rollout.sglang.joint import MAX_JOINT_TOKENS, AskAlone, JointRequests
from gspo_services.rollout.sglang.memory import ServerMemory
from gspo_services.rollout.sglang.patching import RankSums, read_sums, require_answers, tensor_payload
from gspo_services.rollout.sglang.routed import RoutedExperts
from gspo_services.rollout.sglang.scoring import prompt_logprobs
from gspo_services.rollout.sglang.server_info import Checksums, ModelInfo, RankChecksums, ServerInfo, by_rank
from gspo_services.shared.weights import PATCHER, SLOT, SUMMER

log = structlog.get_logger()

__all__ = ["Engine", "EngineError", "EngineRefused", "EngineUnreachable", "PauseMode", "RankChecksums", "ServerInfo"]

PauseMode = Literal["retract", "in_place"]
CUT_AGAIN_S: Final = 1.0
CUT_ALL_AGAIN_S: Final = 0.1
CUTS_OF_ALL: Final = 10
CUTS: Final = 30
_NO_WEIGHTS: Final = (
    "the engine's weights are unknown (failed update, or another process used the GPU): load a version first"
)


class Engine:
    """One SGLang server. Use as a context manager; all methods may be called concurrently.

    One engine object makes all weight updates of a server, because it tells token versions apart by them.
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
        routed: RoutedExperts | None = None,
    ) -> None:
        """``vocab_size`` guards the server, which dies of a token id outside its vocabulary. None leaves it unguarded.

        ``chunk_tokens`` is the least size of a piece that is not the last; an answer that fits in one piece is not
        streamed. ``hold_limit_tokens`` bounds the tokens held back after an update, ``stall_timeout_s`` the wait for the
        next piece, pauses included. ``routed``: pieces have the experts of their tokens, which the server reports at the end
        of a request: all tokens are held until then, and the rest of an answer is asked for after ``hold_limit_tokens``.
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
        self._joint = JointRequests(self._http)
        self._info: ServerInfo | None = None
        self._under_way: set[str] = set()
        self._num_requests = 0
        self._session = secrets.token_hex(4)
        # Odd while an update is under way: two equal even values mean that no update came between.
        self._update_marks = 0
        self._update_ended = asyncio.Event()
        self._update_ended.set()
        self._weights_unknown = False
        self._paused_mode: PauseMode | None = None
        self._routed = routed
        self._num_retracted = 0
        """Pauses after which the engine computes requests under way again."""
        self._may_ask = asyncio.Event()
        """Cleared while requests are cut short before such a pause: what is left of them is asked for after it."""
        self._may_ask.set()
        self.adapters = EngineAdapters(self._http, load_timeout_s)
        self.memory = ServerMemory(self._http, load_timeout_s)
        self._adapters: Mapping[str, Adapter] = {}
        self._open: dict[str, OpenRequest] = {}
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Raises: EngineUnreachable, EngineError."""
        try:
            self._info = await self.server_info()
        except BaseException:
            await self._http.aclose()
            raise
        if self._routed is not None and not self._info.enable_return_routed_experts:
            await self._http.aclose()
            raise EngineError(
                f"the SGLang server at {self.url} does not report the experts that it chooses: start it with "
                '--enable-return-routed-experts, or set objective.routing_replay_from = "learner"'
            )
        if not self._info.enable_deterministic_inference:
            log.info("engine_ignores_seeds", url=self.url, remedy="start it with --enable-deterministic-inference")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    # Generation ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """Sample one completion; the last piece, and only that, has a finish reason.

        Close the iterator (or cancel) to give up: the server notices within 4 s, or, where a short answer was asked for
        together with others, ends it as they end.
        Raises: ValueError for a request that cannot be served, EngineRefused, EngineUnreachable, EngineError.
        """
        self._check(request)
        self._under_way.add(request.rid)
        try:
            async with self._slots:
                input_ids = np.asarray(request.input_ids)
                sampling = request.sampling
                alone = False
                while True:
                    given: list[np.ndarray[Any, Any]] = []
                    try:
                        async with aclosing(self._answer_pieces(request.rid, input_ids, sampling, alone)) as pieces:
                            async for piece in pieces:
                                given.append(piece.token_ids)
                                yield piece
                                if piece.finish_reason is not None:
                                    return
                    except AskAlone:
                        alone = True
                    num_given = sum(len(token_ids) for token_ids in given)
                    input_ids = np.concatenate([input_ids, *given])
                    sampling = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - num_given)
        finally:
            self._under_way.remove(request.rid)

    async def _answer_pieces(
        self, rid: str, input_ids: np.ndarray[Any, Any], sampling: SamplingParameters, alone: bool
    ) -> AsyncGenerator[OutputPiece, None]:
        """One HTTP request. It ends without a finish reason when it was cut short: ask for the rest.

        It is cut short when it would hold back too many tokens of unknown version.
        """
        await self._may_ask.wait()
        self._num_requests += 1
        # SGLang aborts every request whose id begins with the one given, hence the ';'. And 2 s after the end of a stream it
        # aborts that id once more, even in another request: so no id is used twice, nor by another engine object.
        server_rid = f"{rid}#{self._session}-{self._num_requests};"
        self._open[server_rid] = OpenRequest(self._adapter_of(sampling))
        try:
            async with aclosing(self._pieces_of(server_rid, rid, input_ids, sampling, alone)) as pieces:
                async for piece in pieces:
                    yield piece
        except EngineRefused as error:
            adapter = self._open[server_rid].adapter
            if adapter is not None and adapter.name in str(error):
                # It is not about the request: the server was started again, and no longer has the adapter.
                raise EngineError(str(error)) from error
            raise
        finally:
            del self._open[server_rid]
            self._ended.set()

    async def _pieces_of(
        self, server_rid: str, rid: str, input_ids: np.ndarray[Any, Any], sampling: SamplingParameters, alone: bool
    ) -> AsyncGenerator[OutputPiece, None]:
        request = self._open[server_rid]
        adapter = request.adapter
        stream = sampling.max_new_tokens > self._chunk_tokens
        name = None if adapter is None else adapter.name
        routed = self._routed
        fields = generate_fields(
            server_rid, input_ids.tolist(), sampling, stream, self._chunk_tokens, name, with_experts=routed is not None
        )
        if alone or stream or adapter is not None or routed is not None or sampling.max_new_tokens > MAX_JOINT_TOKENS:
            answers = self._http.answers(msgspec.json.encode(fields), stream=stream)
        else:
            answers = self._joint.answers(fields)
        decoder = OutputDecoder(incremental=self._server.incremental_streaming_output)
        tagger = VersionTagger(self._chunk_tokens)
        mark, num_retracted = self._update_marks, self._num_retracted
        async with aclosing(answers) as payloads:
            async for payload in payloads:
                # Output that left the server before an update may arrive during it: it is good if the update succeeds.
                await self._update_ended.wait()
                if self._weights_unknown:
                    raise EngineError(_NO_WEIGHTS)
                try:
                    output = decoder.decode(payload)
                    valid = None if num_retracted == self._num_retracted else output.server_version
                    output = output if adapter is None else adapter.of_version(output)
                    experts = None
                    if routed is not None and output.spans is not None:
                        aborted = output.finish_reason == "abort"
                        experts = routed.read(output.experts, output.spans, valid, may_lack=aborted)
                except RequestRefused as error:
                    raise EngineRefused(f"request {rid}: {error}") from error
                except (ValueError, msgspec.MsgspecError) as error:
                    raise EngineError(f"request {rid}: {error}: {payload[:300]!r}") from error
                untouched = mark == self._update_marks and mark % 2 == 0
                certain = routed is None and (untouched or adapter is not None)
                piece = tagger.push(output, certain=certain)
                if piece is not None:
                    piece = msgspec.structs.replace(piece, experts=experts)
                    reason = true_reason(piece.finish_reason, tagger.num_given, tagger.last_given, sampling)
                    if reason == "abort" and request.cut and not request.is_over:
                        reason = None
                    if reason == "stop":
                        self._require_known_end(tagger.last_given, sampling)
                    if len(piece.token_ids) or reason is not None:
                        yield msgspec.structs.replace(piece, finish_reason=reason)
                elif tagger.num_held > self._hold_limit_tokens and not request.cut:
                    request.cut = True
                    await self._http.post("/abort_request", {"rid": server_rid})
                if output.finish_reason is not None:
                    return
        raise EngineUnreachable(f"request {rid}: the engine closed the stream before its end")

    def _require_known_end(self, token: int | None, sampling: SamplingParameters) -> None:
        """Raises: EngineError for an answer that ended at a token which ends none here."""
        if sampling.stop_token_ids and not sampling.ignore_eos and token not in sampling.stop_token_ids:
            raise EngineError(
                f"the server at {self.url} ended an answer at token {token}, and model.path ends answers at "
                f"{', '.join(map(str, sampling.stop_token_ids))}: its config.json or generation_config.json is another one; "
                "serve the files of model.path"
            )

    async def stop_generating(self) -> None:
        """End every request on the server: the last piece of each has all its tokens, and the finish reason "abort".

        Raises: EngineError.
        """
        for each in self._open.values():
            each.is_over = True
        await self._http.post("/abort_request", {"abort_all": True})

    # Adapters ------------------------------------------------------------------------------------------------------

    def serve(self, adapters: Mapping[str, Adapter]) -> None:
        """From now on requests begin with these, which the server has, by their names in the run; those under way keep
        theirs. An only one has no name."""
        self._adapters = adapters

    def _adapter_of(self, sampling: SamplingParameters) -> Adapter | None:
        if not self._adapters and not sampling.adapter:
            return None
        if sampling.adapter not in self._adapters:
            raise ValueError(
                f"the request is for adapter {sampling.adapter!r}, and {', '.join(self._adapters) or 'none'} are served: "
                "broker and rollouts need the same lora.adapters"
            )
        return self._adapters[sampling.adapter]

    def uses(self, name: str) -> bool:
        """Whether a request under way has the adapter of this name."""
        return any(each.adapter is not None and each.adapter.name == name for each in self._open.values())

    async def cut(self, name: str) -> bool:
        """End the requests that have this adapter; the rest of each is asked for with the one that is served by now.

        Returns True when none is left; False when some stay for long, because their output is not read. The server forgets
        an abort of a request that it has not read yet, so it is told again. Raises: EngineError.
        """
        for _ in range(CUTS):
            if not self.uses(name):
                return True
            self._ended.clear()
            aborts = []
            for server_rid, each in self._open.items():
                if each.adapter is not None and each.adapter.name == name:
                    each.cut = True
                    aborts.append(self._http.post("/abort_request", {"rid": server_rid}))
            await asyncio.gather(*aborts)
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_AGAIN_S):
                    while self.uses(name):
                        await self._ended.wait()
                        self._ended.clear()
        return not self.uses(name)

    # Weights -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop decoding; new requests wait at the server. The module's docstring explains the modes."""
        try:
            if mode == "retract":
                if self._routed is not None:
                    await self._cut_all()
                self._num_retracted += 1
            await self._http.post("/pause_generation", {"mode": mode})
            self._paused_mode = mode
        finally:
            self._may_ask.set()

    async def _cut_all(self) -> None:
        """Have all requests under way end with their experts, which the server would compute again under new weights.

        It does not wait for long for those whose output is not read: they go on without their old tokens' experts.
        """
        self._may_ask.clear()
        for _ in range(CUTS_OF_ALL):
            if not self._open:
                return
            self._ended.clear()
            for each in self._open.values():
                each.cut = True
            await asyncio.gather(*(self._http.post("/abort_request", {"rid": rid}) for rid in self._open))
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_ALL_AGAIN_S):
                    while self._open:
                        await self._ended.wait()
                        self._ended.clear()

    async def resume(self) -> None:
        """Continue decoding after ``pause``."""
        await self._http.post("/continue_generation", {})
        self._paused_mode = None

    async def update_weights_from_disk(
        self, path: Path, version: int, *, check: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Load the ``*.safetensors`` of ``path`` (it needs no other file) and make ``version`` the server's version.

        A tensor that is not in the directory keeps its value, and SGLang **skips a name that it does not know in silence**:
        verify. A paused server loads at once, another one when the requests under way have ended. The prefix cache is
        flushed, except while paused in place: there it is impossible, and old entries stay in use.
        ``check`` is called when the weights are loaded; the update fails with what it raises.
        Raises: EngineError, after which ``generate`` refuses until an update succeeds.
        """
        body = {
            "model_path": str(path),
            # Always sent: the server's default is the value of the call before.
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": self._paused_mode != "in_place",
        }
        async with self.updating(version, check) as http:
            await http.post("/update_weights_from_disk", body, timeout_s=self._load_timeout_s)

    async def patch_weights(self, path: Path, version: int, *, check: Callable[[], Awaitable[None]] | None = None) -> None:
        """Change elements of the live parameters, as gspo_services.rollout.weights.patch wrote them into ``path``.

        Otherwise the same as ``update_weights_from_disk``. Only servers that have gspo_services.shared.weights.PATCHER can.
        """
        body = {"weight_version": str(version), "flush_cache": self._paused_mode != "in_place"}
        async with self.updating(version, check):
            await self._call_loader(PATCHER, path, body)
            require_answers(path, self._server.spread.tensor, "not patched")

    async def weight_sums(self, path: Path) -> list[RankSums]:
        """Have each rank sum its parameters as the files in ``path`` say (gspo_services.shared.sglang_sums).

        Only servers that have gspo_services.shared.weights.SUMMER can; one that is not paused waits for the requests under
        way. Raises: EngineError.
        """
        await self._call_loader(SUMMER, path, {"flush_cache": False})
        return await asyncio.to_thread(read_sums, path, self._server.spread.tensor)

    async def _call_loader(self, name: str, path: Path, body: dict[str, Any]) -> None:
        """Have a loader of ours work in the directory ``path``."""
        body = {
            "serialized_named_tensors": [tensor_payload(str(path).encode())] * self._server.spread.tensor,
            "load_format": name,
            "selector": "target",
            **body,
        }
        await self._http.post("/begin_weight_update", {"selector": "target"}, timeout_s=self._load_timeout_s)
        try:
            await self._http.post("/update_weights_from_tensor", body, timeout_s=self._load_timeout_s)
        finally:
            await self._http.post("/end_weight_update", {}, timeout_s=self._load_timeout_s)

    @asynccontextmanager
    async def updating(self, version: int, check: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[EngineHttp]:
        """Inside, the caller loads ``version`` into the server; afterwards the server must report that version.

        ``check`` runs concurrently with that query, because generation waits for both.
        Raises: EngineError, after which ``generate`` refuses until an update succeeds.
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
                raise EngineError(f"version {version} was loaded, but the server reports {served}")
            self._weights_unknown = False
        finally:
            self._update_marks += 1
            self._update_ended.set()

    async def release_memory(self) -> None:
        """See ``ServerMemory.release``; afterwards ``generate`` refuses until a version is loaded."""
        self._weights_unknown = True
        await self.memory.release(self._paused_mode)

    async def control(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        """POST to a path of SGLang that has no method here. Raises: EngineError."""
        await self._http.post(path, body, timeout_s=timeout_s)

    async def weights_checksums(self) -> list[RankChecksums]:
        """Ask for the checksums of each rank's parameters, in the order of ``RankChecksums``; works while paused.

        Raises: EngineError, also when a rank does not answer, or for a server that shares the model in an unknown way.
        """
        content = await self._http.post("/weights_checker", {"action": "checksum"}, timeout_s=self._load_timeout_s)
        answer = decode_answer(content, Checksums)
        try:
            return [_without_slots(rank) for rank in by_rank(answer, self._server.spread)]
        except ValueError as error:
            # Another server may run at server_url by now.
            self._info = await self.server_info()
            raise EngineError(str(error)) from error

    async def weight_version(self) -> int | None:
        """Ask which version the server serves; None when it was started without a number as --weight-version."""
        text = (await self._http.get("/model_info", ModelInfo)).weight_version
        try:
            return parse_version(text)
        except ValueError:
            return None

    async def probed(self, probe: Probe) -> list[float]:
        """Return the log-probs of the tokens that ``probe`` scores; with adapters, those of the first that is served.

        Call it while nothing else is asked for. Raises: EngineError.
        """
        token_ids = probe_tokens(probe.num_tokens, probe.vocabulary).tolist()
        adapter = next((each.name for each in self._adapters.values()), "")
        found: list[float] = []
        for first, last in probe_spans(probe.num_tokens):
            found += await prompt_logprobs(self._http, token_ids[:last], first, adapter)
        return found

    # State ---------------------------------------------------------------------------------------------------------

    async def server_info(self) -> ServerInfo:
        return await self._http.get("/server_info", ServerInfo)

    @property
    def _server(self) -> ServerInfo:
        if self._info is None:
            raise EngineError("the engine is not open: use it as a context manager: async with Engine(url) as engine")
        return self._info

    # Checks --------------------------------------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        if self._weights_unknown and self._update_ended.is_set():
            raise EngineError(_NO_WEIGHTS)
        if request.rid in self._under_way:
            raise ValueError(f"request {request.rid} is under way already: use another rid")
        input_ids = np.asarray(request.input_ids)
        lowest, highest = input_ids.min(), input_ids.max()
        if lowest < 0 or (self._vocab_size is not None and highest >= self._vocab_size):
            raise ValueError(
                f"request {request.rid}: token ids range from {lowest} to {highest}, the vocabulary has {self._vocab_size}: "
                "an id outside crashes the server"
            )


async def _nothing() -> None:
    """No check."""


def _without_slots(rank: RankChecksums) -> RankChecksums:
    """The checksums of the model alone: adapters come and go."""
    own = {name: checksum for name, checksum in rank.checksums.items() if not name.startswith(SLOT)}
    return msgspec.structs.replace(rank, checksums=own)
