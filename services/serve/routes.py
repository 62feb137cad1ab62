"""Tinker's API over HTTP, as client 0.38.0 speaks it: what is asked for, accepted or refused; nothing is computed here.

The client counts a call even when it was refused with a status 4xx, and every later call of its model then waits for ever.
So whatever has a model and a number is accepted, and its future fails.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web

from gspo_protocol.sessions import new_session
from gspo_services.serve.calls import (
    CREATES,
    CreateModel,
    Kind,
    LoadWeights,
    SampleCall,
    SamplingSession,
    UserError,
    model_id_of,
    sampler_id_of,
)
from gspo_services.serve.execution import Execution
from gspo_services.serve.samples import SampleFutures
from gspo_services.serve.sampling import Sampler
from gspo_services.serve.table import CallTable, OtherCallError, SavedWeights
from gspo_services.serve.wire import CallLimits, call_address

log = structlog.get_logger()

V1: Final = "/api/v1"
MAX_BODY_BYTES: Final = 64 * 2**20
MAX_WAITING: Final = 10_000
"""Accepted calls of a model that are not executed yet."""
POLL_S: Final = 25.0
"""The client gives a poll 45 s, and asks again at once when nothing was there."""
PROTOBUF: Final = "application/x-protobuf"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Address(msgspec.Struct):
    model_id: str
    seq_id: int


class _NewModel(msgspec.Struct):
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None


class _SampleAddress(msgspec.Struct):
    sampling_session_id: str
    seq_id: int
    num_samples: int = 1


class _Future(msgspec.Struct):
    request_id: str


class _ModelId(msgspec.Struct):
    model_id: str


class _TinkerPath(msgspec.Struct):
    tinker_path: str


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What clients are told of the base model."""

    names: tuple[str, ...]
    path: Path
    """Where its tokenizer is: the client loads it from there, so both are on one machine, or have it in one place."""
    longest: int


class ClientRoutes:
    """The handlers, and what they stand on."""

    def __init__(
        self,
        table: CallTable,
        execution: Execution,
        sampler: Sampler,
        samples: SampleFutures,
        *,
        model: ServedModel,
        limits: CallLimits,
        directory: Path,
        key: str,
    ) -> None:
        """``key``: what X-API-Key must be; empty: anything."""
        self._table, self._execution, self._sampler, self._samples = table, execution, sampler, samples
        self._model, self._limits, self._directory, self._key = model, limits, directory, key

    def application(self) -> web.Application:
        """The service, to be listened for."""
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        posts: dict[str, _Handler] = {
            "client/config": self._config,
            "client/dynamic_config": self._nothing,
            "create_session": self._create_session,
            "session_heartbeat": self._nothing,
            "sessions/{id}/finish": self._nothing,
            "telemetry": self._telemetry,
            "cancel_future": self._nothing,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
            **{kind: self._numbered(kind) for kind in ("optim_step", "save_weights", "save_weights_for_sampler")},
        }
        gets: dict[str, _Handler] = {
            "healthz": self._nothing,
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": self._get_sampler,
            "training_runs/{id}": self._training_run,
        }
        application.add_routes([web.post(f"{V1}/{path}", handler) for path, handler in posts.items()])
        application.add_routes([web.get(f"{V1}/{path}", handler) for path, handler in gets.items()])
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if self._key and not hmac.compare_digest(request.headers.get("X-API-Key", "").encode(), self._key.encode()):
            return _refused(HTTPStatus.UNAUTHORIZED, "X-API-Key is not this service's key; set TINKER_API_KEY to it")
        try:
            return await handler(request)
        except (msgspec.MsgspecError, UnicodeDecodeError, UserError, RecursionError) as error:
            return _refused(HTTPStatus.BAD_REQUEST, f"{request.path}: {error}")
        except OtherCallError as error:
            return _refused(HTTPStatus.CONFLICT, str(error))
        except web.HTTPRequestEntityTooLarge:
            text = f"{request.path}: the body has more than {MAX_BODY_BYTES} bytes; send fewer datums in a call"
            return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            text = f"{request.method} {request.path} is not served here; this service speaks Tinker's API below {V1}"
            return _refused(HTTPStatus.NOT_FOUND, text)

    # Sessions and facts ----------------------------------------------------------------------------------------------

    async def _nothing(self, request: web.Request) -> web.Response:
        return _json()

    async def _telemetry(self, request: web.Request) -> web.Response:
        return _json(status="accepted")

    async def _config(self, request: web.Request) -> web.Response:
        return _json(
            pjwt_auth_enabled=False,
            sample_use_retrieve_futures=False,
            proto_compress_fwdbwd=False,
            parallel_fwdbwd_chunks=True,
            fwdbwd_max_chunk_len=self._limits.max_datums,
            fwdbwd_max_chunk_bytes_count=5_000_000,
        )

    async def _create_session(self, request: web.Request) -> web.Response:
        return _json(type="create_session", session_id=new_session())

    async def _capabilities(self, request: web.Request) -> web.Response:
        each = {"max_context_length": self._model.longest, "trainable": True, "sampleable": True}
        return _json(supported_models=[{"model_name": name, **each} for name in self._model.names])

    async def _get_info(self, request: web.Request) -> web.Response:
        model_id = (await _read(request, _ModelId)).model_id
        rank = self._execution.rank(model_id)
        if rank is None:
            return _refused(HTTPStatus.NOT_FOUND, f"model {model_id!r} is not here")
        name = self._model.names[0]
        data = {"arch": "adapter", "model_name": name, "tokenizer_id": str(self._model.path.resolve())}
        return _json(
            type="get_info", model_id=model_id, model_name=name, is_lora=True, lora_rank=rank, model_data=data
        )  # fmt: skip

    async def _training_run(self, request: web.Request) -> web.Response:
        model_id = request.match_info["id"]
        rank = self._execution.rank(model_id)
        if rank is None:
            return _refused(HTTPStatus.NOT_FOUND, f"training run {model_id!r} is not here")
        return _json(
            training_run_id=model_id, base_model=self._model.names[0], model_owner="local", is_lora=True, lora_rank=rank,
            last_request_time=self._execution.last_call(model_id),
        )  # fmt: skip

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = (await _read(request, _TinkerPath)).tinker_path
        if (saved := self._table.saved(path)) is None:
            return _not_saved(path)
        return _json(base_model=self._model.names[0], is_lora=True, lora_rank=saved.rank)

    # Models ----------------------------------------------------------------------------------------------------------

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await request.read()
        address = msgspec.json.decode(body, type=CreateModel)
        return await self._accept(model_id_of(address.session_id, address.model_seq_id), CREATES, "create_model", body)

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await request.read()
        asked = msgspec.json.decode(body, type=LoadWeights)
        if asked.model_id is not None and asked.seq_id is not None:
            return await self._accept_numbered(asked.model_id, asked.seq_id, "load_weights", body)
        if asked.session_id is None or asked.model_seq_id is None:
            raise UserError("give model_id and seq_id, or session_id and model_seq_id")
        return await self._accept(model_id_of(asked.session_id, asked.model_seq_id), CREATES, "load_weights", body)

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = await request.read()
        model, seq = call_address(body)
        return await self._accept_numbered(model, seq, "forward_backward", body)

    def _numbered(self, kind: Kind) -> _Handler:
        async def handler(request: web.Request) -> web.Response:
            body = await request.read()
            address = msgspec.json.decode(body, type=_Address)
            return await self._accept_numbered(address.model_id, address.seq_id, kind, body)

        return handler

    async def _accept_numbered(self, model: str, seq: int, kind: Kind, body: bytes) -> web.Response:
        if not self._execution.knows(model):
            return _refused(HTTPStatus.NOT_FOUND, f"model {model[:300]!r} is not here; make it with create_model")
        if not CREATES < seq < 2**31:
            raise UserError(f"seq_id is {seq}; a model's calls are counted from 1")
        if self._execution.num_waiting(model) >= MAX_WAITING:
            return _refused(HTTPStatus.TOO_MANY_REQUESTS, f"{MAX_WAITING} calls of {model} wait; wait for their answers")
        return await self._accept(model, seq, kind, body)

    async def _accept(self, model: str, seq: int, kind: Kind, body: bytes) -> web.Response:
        return _json(request_id=await self._execution.accept(model, seq, kind, body), model_id=model)

    async def _retrieve(self, request: web.Request) -> web.Response:
        request_id = (await _read(request, _Future)).request_id
        futures = self._samples if self._samples.knows(request_id) else self._execution
        try:
            answer = await futures.answer(request_id, POLL_S)
        except KeyError:
            return _refused(HTTPStatus.GONE, f"request {request_id[:300]!r} is not known here: ask again")
        if answer is None:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(pending, status=HTTPStatus.REQUEST_TIMEOUT)
        is_json = answer.startswith(b"{")
        return web.Response(body=answer, content_type="application/json" if is_json else PROTOBUF)

    # Samples ---------------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        asked = await _read(request, SamplingSession)
        path = asked.model_path or ""
        if path:
            saved = self._table.saved(path)
            if saved is None or not saved.sampler:
                return _not_saved(path)
        elif asked.base_model not in self._model.names:
            text = f"base_model is {asked.base_model!r}; this service has {', '.join(self._model.names)}"
            return _refused(HTTPStatus.NOT_FOUND, text)
        session = sampler_id_of(asked.session_id, asked.sampling_session_seq_id)
        self._table.open_sampler(session, path)
        return _json(type="create_sampling_session", sampling_session_id=session)

    async def _get_sampler(self, request: web.Request) -> web.Response:
        sampler_id = request.match_info["id"]
        if self._table.sampler(sampler_id) is None:
            return _refused(HTTPStatus.NOT_FOUND, f"sampler {sampler_id[:300]!r} is not here")
        return _json(sampler_id=sampler_id, base_model=self._model.names[0])

    async def _sample(self, request: web.Request) -> web.Response:
        body = await request.read()
        address = msgspec.json.decode(body, type=_SampleAddress)
        path = self._table.sampler(address.sampling_session_id)
        if path is None:
            return _refused(HTTPStatus.NOT_FOUND, f"sampling session {address.sampling_session_id[:300]!r} is not here")
        request_id = f"{address.sampling_session_id}:{address.seq_id}"
        if not self._samples.knows(request_id):
            if self._samples.is_full:
                return _refused(HTTPStatus.TOO_MANY_REQUESTS, "too many samples wait")
            saved = self._table.saved(path) if path else None
            try:
                call = msgspec.json.decode(body, type=SampleCall)
                self._samples.begin(request_id, self._sampler.sample(call, self._folder(saved)))
            except msgspec.MsgspecError as error:
                self._samples.fail(request_id, f"asample: {error}")
        names = [f"{request_id}:{index}" for index in range(max(0, min(address.num_samples, 4096)))]
        return _json(request_id=request_id, sample_sequence_ids=names)

    def _folder(self, saved: SavedWeights | None) -> Path | None:
        return None if saved is None else self._directory / saved.directory


async def _read(request: web.Request, kind: type[Any]) -> Any:
    return msgspec.json.decode(await request.read(), type=kind)


def _json(**fields: Any) -> web.Response:
    return web.json_response(fields)


def _refused(status: HTTPStatus, text: str) -> web.Response:
    log.info("refused", status=int(status), reason=text)
    return web.json_response({"detail": text}, status=status)


def _not_saved(path: str) -> web.Response:
    return _refused(HTTPStatus.NOT_FOUND, f"path {path[:300]!r} was not saved here to sample from")
