"""The HTTP server of the endpoint: one process's episodes, each behind its key."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Final
from urllib.parse import unquote

import msgspec
import structlog
from aiohttp import web

from gspo_services.rollout.endpoint.anthropic import count_page
from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.calls import CallAnswer, CallDelta, CallRefused, Calls, Episodes
from gspo_services.rollout.endpoint.dialects import COUNT_PATH, DIALECTS, MESSAGES_PATH, MODELS_PATH
from gspo_services.rollout.endpoint.exchange import OVERRIDDEN_HEADER, AgentGone, Exchange
from gspo_services.rollout.endpoint.fields import decode_body
from gspo_services.rollout.endpoint.metrics import EndpointMetrics
from gspo_services.rollout.endpoint.pages import model_page, models_page
from gspo_services.rollout.endpoint.responses import KeptByEpisode
from gspo_services.rollout.endpoint.sampling import RunSampling, without_demand
from gspo_services.shared.runtime.clock import Clock, MonotonicClock
from gspo_services.shared.runtime.http_listener import listen
from gspo_services.shared.runtime.plain_text import one_line

log = structlog.get_logger()

AGENT_GONE: Final = 499
"""The status of a call whose agent went away, as nginx counts it; it is never sent."""
_MAX_NAMED_FIELDS: Final = 100
_DRAINING: Final = "this rollout is stopping: another rollout continues the episode, or it is dropped. Call again from there"
_INTERNAL: Final = "the rollout failed to answer this call; its log has the reason under this x-request-id"


class EndpointLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on agents' use of a rollout."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_calls: int = 64
    """Calls of one episode at a time."""
    max_connections: int = 4096
    silent_s: float = 60.0
    """Wait for an agent's whole body, and for an agent to take our next bytes."""


class EndpointServer:
    """Serves the calls of a rollout's episodes as OpenAI and Anthropic serve theirs. Use ``start``, and ``stop`` at the end.

    produces:     answers, or streams of them
    waits for:    the episodes' calls; agents that send and read
    unblocked by: what the calls answer; ``EndpointLimits.silent_s``; ``stop``
    """

    def __init__(
        self,
        episodes: Episodes,
        metrics: EndpointMetrics,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sampling: RunSampling | None = None,
        limits: EndpointLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``port`` 0 takes any free one. On a host other than loopback, anyone who reaches it can try keys."""
        self._episodes = episodes
        self._metrics = metrics
        self._host = host
        self._port = port
        self._sampling = sampling or RunSampling()
        self._limits = limits or EndpointLimits()
        self._clock = clock or MonotonicClock()
        self._runner: web.ServerRunner | None = None
        self._running: Counter[str] = Counter()
        self._ends: set[asyncio.Timeout] = set()
        self._num_open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._draining = False
        self._kept = KeptByEpisode()
        self._named_fields: set[str] = set()
        self._named_overridden: set[str] = set()

    @property
    def base_url(self) -> str:
        """The ``base_url`` for an OpenAI client."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Listen. Raises: EndpointError when the port is taken or the address is not of this host."""
        self._runner = await listen(self._serve, self._host, self._port, self._limits.max_connections)
        # The address, because a name may have two, each with its own free port.
        self._host, self._port = self._runner.addresses[0][:2]

    async def stop(self, budget_s: float = 5.0) -> None:
        """Refuse new calls, end running ones with code ``draining``, and close; cut off after ``budget_s``."""
        self._draining = True
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in runner.sites:
            await site.stop()
        for end in self._ends:
            end.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(budget_s):
                await self._none_open.wait()
        except TimeoutError:
            log.warning("endpoint_drain_incomplete", requests=self._num_open, budget_s=budget_s)
        await runner.cleanup()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request. Raises nothing but the cancellation."""
        exchange = Exchange(request, silent_s=self._limits.silent_s)
        status, begin = AGENT_GONE, self._clock.now()
        self._num_open += 1
        self._none_open.clear()
        try:
            status = await self._answer(exchange)
        except AgentGone:
            exchange.hang_up()
        except asyncio.CancelledError:
            exchange.hang_up()
            raise
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._none_open.set()
            if exchange.path in DIALECTS:
                self._metrics.calls.labels(status=str(status)).inc()
                if status == 200:
                    self._metrics.call_seconds.observe(self._clock.now() - begin)
        return exchange.response

    async def _answer(self, exchange: Exchange) -> int:
        """Returns the status of the answer or of the refusal. Raises: AgentGone."""
        try:
            with self._may_be_ended() as end:
                async with end:
                    return await self._route(exchange)
        except CallRefused as error:
            refused = error
        except AgentGone:
            raise
        # A call may fail in any way; other episodes must not notice.
        except Exception as error:
            if isinstance(error, TimeoutError) and end.expired():
                refused = CallRefused(503, "draining", _DRAINING)
            else:
                log.exception("endpoint_call_failed", request_id=one_line(exchange.request_id))
                refused = CallRefused(500, "internal", _INTERNAL)
        self._metrics.refused.labels(code=refused.code).inc()
        await exchange.refuse(refused)
        return refused.status

    @contextmanager
    def _may_be_ended(self) -> Iterator[asyncio.Timeout]:
        """Run the body under a timeout that ``stop`` triggers. Raises: CallRefused after it."""
        if self._draining:
            raise CallRefused(503, "draining", _DRAINING)
        end = asyncio.timeout(None)
        self._ends.add(end)
        try:
            yield end
        finally:
            self._ends.discard(end)

    async def _route(self, exchange: Exchange) -> int:
        method, path = exchange.request.method, exchange.path
        if path in DIALECTS or path == COUNT_PATH:
            _require_method(exchange, "POST")
            return await self._call(exchange)
        if path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
            _require_method(exchange, "GET")
            self._episodes.calls_of(exchange.key)
            model, asked = self._episodes.model, unquote(path.removeprefix(MODELS_PATH).removeprefix("/"))
            if asked not in ("", model):
                text = f"this run serves only the model {model!r}, not {one_line(asked, 100)!r}"
                raise CallRefused(404, "model_not_found", text, param="model")
            return await exchange.answer(200, model_page(model) if asked else models_page(model))
        paths = ", ".join((*DIALECTS, COUNT_PATH))
        text = f"{method} {one_line(path, 100)} is not served: this endpoint has {paths} and {MODELS_PATH}"
        raise CallRefused(404, "unknown_path", text)

    async def _call(self, exchange: Exchange) -> int:
        key = exchange.key
        # Before the body is read: without a key no client may make this process hold one.
        calls = self._episodes.calls_of(key)
        with self._place(key):
            body = await exchange.body(self._limits.max_body_bytes)
            plain = decode_body(body)
            del body
            sampling = msgspec.structs.replace(self._sampling, temperature=calls.temperature)
            read = DIALECTS[MESSAGES_PATH if exchange.path == COUNT_PATH else exchange.path]
            asked = read(plain, sampling, self._episodes.model, self._kept.of(calls))
            del plain
            if exchange.path == COUNT_PATH:
                return await exchange.answer(200, count_page(await calls.count(asked.request)))
            if asked.request.must_call is not None and not calls.can_demand(asked.request):
                asked = without_demand(asked, strict=sampling.strict)
            self._count(asked)
            if asked.overridden:
                exchange.headers[OVERRIDDEN_HEADER] = ", ".join(asked.overridden)
            return await self._give(exchange, calls, asked)

    @contextmanager
    def _place(self, key: str) -> Iterator[None]:
        """One of the episode's places for calls. Raises: CallRefused, status 429, when all are taken."""
        if self._running[key] >= self._limits.max_calls:
            text = f"{self._limits.max_calls} calls of this episode are under way, the most allowed: wait for one to end"
            raise CallRefused(429, "too_many_calls", text)
        self._running[key] += 1
        self._metrics.calls_running.inc()
        try:
            yield
        finally:
            self._metrics.calls_running.dec()
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    async def _give(self, exchange: Exchange, calls: Calls, asked: AgentCall) -> int:
        status = None
        exchange.failed = asked.writer.failed
        async with aclosing(calls.call(asked.request)) as pieces:
            async for piece in pieces:
                if not asked.stream:
                    if isinstance(piece, CallAnswer):
                        status = await exchange.answer(200, asked.writer.whole(piece))
                    continue
                for event in asked.writer.text(piece) if isinstance(piece, CallDelta) else asked.writer.end(piece):
                    await exchange.send(event)
                if isinstance(piece, CallAnswer):
                    await exchange.end_stream()
                    status = 200
        if status is None:
            raise RuntimeError("the call ended without an answer")
        return status

    def _count(self, asked: AgentCall) -> None:
        for name in asked.overridden:
            self._metrics.overridden.labels(parameter=name).inc()
        if new := set(asked.overridden) - self._named_overridden:
            self._named_overridden |= new
            log.info("endpoint_fields_overridden", fields=sorted(new), remedy="the run decides them; strict refuses them")
        self._metrics.unknown_fields.inc(len(asked.unknown))
        room = _MAX_NAMED_FIELDS - len(self._named_fields)
        new = {one_line(name, 64) for name in asked.unknown[:room]} - self._named_fields
        if new:
            self._named_fields |= new
            log.info("endpoint_fields_ignored", fields=sorted(new))


def _require_method(exchange: Exchange, method: str) -> None:
    if exchange.request.method != method:
        exchange.headers["allow"] = method
        raise CallRefused(405, "wrong_method", f"{one_line(exchange.request.path, 100)} accepts only {method}")
