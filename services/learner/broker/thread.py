"""Runs a rank's sockets in a separate thread: collectives never share a thread with sockets.

The training thread calls blocking methods. This thread's event loop holds the batch channel and the weight server. Queues
between the two are bounded. Every blocking call has a timeout, and ends when the loop fails.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, Self, TypeVar

import structlog
import zmq.asyncio

from gspo_protocol.messages import LedgerCommit, Welcome
from gspo_services.learner.broker.loop import REQUEST_INTERVAL_S, BrokerLoop, KnownCommit
from gspo_services.learner.broker.part_loop import PartLoop
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.learner.broker.port import Answer, BrokerPort, NoBroker, PartArrived, Publication, ToBroker
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings

log = structlog.get_logger()
T = TypeVar("T")

CALL_TIMEOUT_S: Final = 600.0
MAX_ARRIVALS: Final = CREDIT + 4
"""A batch, its parts, and the word that it is to be skipped, with room to spare."""


class Loop(Protocol):
    """What runs in a ``LoopThread``. Its coroutines run in the event loop that it was made in."""

    @property
    def encoding(self) -> bool: ...
    async def run(self, started: Callable[[], None]) -> None: ...


L = TypeVar("L", bound=Loop)


class LoopThread(Generic[L]):
    """The training thread's side of a ``Loop``, and the thread that the loop runs in, a context manager. Every later call
    raises what ended the loop."""

    _loop: L

    def __init__(self, connect: Callable[[zmq.asyncio.Context], L], name: str) -> None:
        """``connect`` makes the loop's object, in its thread."""
        self._connect = connect
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._failure: BaseException | None = None
        self._main: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._event_loop = self._started.result(timeout=CALL_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main is not None and not self._ended.done():
            # It may end by itself at this moment.
            with contextlib.suppress(RuntimeError):
                self._event_loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(timeout=10.0)

    def _wait_for(self, event: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Wait ``timeout_s`` for ``event``; start over while digests or a delta are computed: no broker can hurry those."""
        while True:
            try:
                return self._call(event(), timeout_s)
            except TimeoutError:
                if not self._loop.encoding:
                    raise

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``coroutine`` in the loop. Raises: TimeoutError; what ended the loop."""
        future = self._submit(coroutine)
        if future is not None:
            either: list[concurrent.futures.Future[Any]] = [future, self._ended]
            done, _ = concurrent.futures.wait(either, timeout_s, concurrent.futures.FIRST_COMPLETED)
            if not done:
                future.cancel()
                raise TimeoutError(f"the broker's loop gave no answer within {timeout_s:.0f} s")
            if future in done and not future.cancelled():
                return future.result()
        # The loop's end can cancel the call before its reason is known.
        self._ended.result()
        coroutine.close()
        raise self._end()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T] | None":
        """None: the event loop is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        except RuntimeError:
            return None

    def _require_alive(self) -> None:
        if self._ended.done():
            raise self._end()

    def _end(self) -> BaseException:
        """Return the error that ended the loop."""
        return ServiceError("the learner's sockets are closed") if self._failure is None else self._failure

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            log.debug("loop_closed")
        # The training thread's next call raises it.
        except BaseException as error:  # noqa: BLE001
            self._failure = error
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        context = zmq.asyncio.Context()
        event_loop = asyncio.get_running_loop()
        try:
            self._loop = self._connect(context)
            self._main = asyncio.current_task()
            await self._loop.run(lambda: self._started.set_result(event_loop))
        finally:
            context.destroy(linger=1000)


class BrokerThread(LoopThread[BrokerLoop], BrokerPort):
    """Rank 0's sockets.

    produces:     batches and ends of run, in order of request
    waits for:    the broker
    unblocked by: Batch, BatchPart, EndOfRun; the caller's timeout
    """

    def __init__(
        self,
        settings: Settings,
        *,
        session: str,
        clock: Clock,
        health: Health,
        metrics: LearnerMetrics,
        request_interval_s: float = REQUEST_INTERVAL_S,
        known: KnownCommit = lambda: None,
    ) -> None:
        """See ``BrokerLoop``."""
        # One request is under way at a time, and few parts of its batch, so that there is room.
        self._arrived: queue.Queue[Answer] = queue.Queue(maxsize=MAX_ARRIVALS)
        connect = partial(
            BrokerLoop, settings,
            session=session, clock=clock, health=health, metrics=metrics, arrived=self._arrived.put_nowait,
            request_interval_s=request_interval_s, known=known,
        )  # fmt: skip
        super().__init__(connect, "broker-loop")

    def know_ranks(self, endpoints: Sequence[str]) -> None:
        """The other ranks' weight servers are at ``endpoints``. Raises: EndpointError."""
        self._call(self._loop.know_ranks(endpoints), CALL_TIMEOUT_S)

    # --- called by the training thread -------------------------------------------------------------------------------

    @property
    def reason_to_wait(self) -> str:
        return self._loop.reason_to_wait

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        try:
            return self._call(self._loop.welcome(), timeout_s)
        except TimeoutError:
            return None

    def commit(self) -> LedgerCommit | None:
        return self._loop.commit

    def tell(self, message: ToBroker) -> None:
        with self._needs_acknowledgement():
            self._call(self._loop.send(message), CALL_TIMEOUT_S)

    def take(self, timeout_s: float) -> Answer | None:
        arrived = self._next_arrival(timeout_s)
        if isinstance(arrived, PartArrived):
            with self._needs_acknowledgement():
                self._call(self._loop.part_taken(), CALL_TIMEOUT_S)
        return arrived

    def scores(self) -> Mapping[int, float | None]:
        return self._loop.scores

    def publish(self, publication: Publication) -> None:
        with self._needs_acknowledgement():
            self._call(self._loop.publish(publication), CALL_TIMEOUT_S)

    def wait_for_room(self) -> None:
        with self._needs_acknowledgement():
            self._wait_for(self._loop.has_room, CALL_TIMEOUT_S)

    def acknowledged(self, next_batch: int) -> bool:
        return self._call(self._loop.reported_batches(), CALL_TIMEOUT_S) >= next_batch

    def flush(self, timeout_s: float) -> bool:
        try:
            self._wait_for(self._loop.flushed, timeout_s)
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def _needs_acknowledgement(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ServiceError(
                f"the broker at {self._loop.endpoint} has acknowledged nothing for {CALL_TIMEOUT_S:.0f} s: is it running?"
            ) from error

    def _next_arrival(self, timeout_s: float) -> Answer | None:
        """Wait for an answer from the loop; None when nothing came in time. Raises: what ended the loop."""
        self._require_alive()
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            self._require_alive()
            return None


class RankThread(LoopThread[PartLoop], NoBroker):
    """The sockets of a rank other than 0, which serves its part of versions."""

    def __init__(self, settings: Settings, *, clock: Clock, metrics: LearnerMetrics, rank: int, local_rank: int) -> None:
        """See ``PartLoop``."""
        connect = partial(PartLoop, settings, clock=clock, metrics=metrics, rank=rank, local_rank=local_rank)
        super().__init__(connect, "part-loop")

    @property
    def endpoint(self) -> str:
        """Where it is bound."""
        return self._loop.endpoint

    def publish(self, publication: Publication) -> None:
        self._within(partial(self._loop.publish, publication))

    def wait_for_room(self) -> None:
        self._within(self._loop.has_room)

    def _within(self, event: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            self._wait_for(event, CALL_TIMEOUT_S)
        except TimeoutError as error:
            raise ServiceError(f"this rank's part of a version was not ready within {CALL_TIMEOUT_S:.0f} s") from error
