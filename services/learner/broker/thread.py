"""Runs rank 0's sockets in a separate thread: collectives never share a thread with sockets.

The training thread calls blocking methods. This thread's event loop holds the batch channel and the weight server. Queues
between the two are bounded. Every blocking call has a timeout, and ends when the loop fails.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog
import zmq.asyncio

from gspo_services.learner.broker.batches import Answer
from gspo_services.learner.broker.client import CALL_TIMEOUT_S, BrokerClient
from gspo_services.learner.broker.connections import MakeConnections
from gspo_services.learner.broker.loop import REQUEST_INTERVAL_S, BrokerLoop, KnownCommit
from gspo_services.learner.broker.one_connection import OneConnection
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings

log = structlog.get_logger()
T = TypeVar("T")

MAX_ARRIVALS: Final = CREDIT + 4
"""A batch, its parts, and the word that it is to be skipped, with room to spare."""


def max_arrivals(num_brokers: int) -> int:
    """Return how many answers may wait for the training thread. Of several brokers, the batch is announced again for each
    whose share cannot be read.
    """
    return MAX_ARRIVALS + num_brokers - 1


class BrokerThread(BrokerClient):
    """A ``BrokerClient`` and the thread that its loop runs in, a context manager. Every later call raises what ended
    the loop.

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
        connections: MakeConnections = OneConnection,
        request_interval_s: float = REQUEST_INTERVAL_S,
        known: KnownCommit = lambda _: None,
    ) -> None:
        """``connections``: connects to the broker, or to several. ``request_interval_s``: time between repetitions of an
        unanswered request. ``known``: what a former life was told."""
        self._connections = connections
        self._known = known
        self._request_interval_s = request_interval_s
        self._settings = settings
        self._session = session
        self._clock = clock
        self._health = health
        self._metrics = metrics
        # One request is under way at a time, and few parts of its batch, so that there is room.
        self._arrived: queue.Queue[Answer] = queue.Queue(maxsize=max_arrivals(settings.broker.num_brokers))
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_thread, name="broker-loop", daemon=True)
        self._failure: BaseException | None = None
        self._main: asyncio.Task[None] | None = None

    def __enter__(self) -> "BrokerThread":
        self._thread.start()
        self._event_loop = self._started.result(timeout=CALL_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main is not None and not self._ended.done():
            # It may end by itself at this moment.
            with contextlib.suppress(RuntimeError):
                self._event_loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(timeout=10.0)

    # --- called by the training thread -------------------------------------------------------------------------------

    def _next_arrival(self, timeout_s: float) -> Answer | None:
        self._require_alive()
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            self._require_alive()
            return None

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
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
        return ServiceError("the learner's connection to the broker is closed") if self._failure is None else self._failure

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            log.debug("broker_loop_closed")
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
            self._loop = BrokerLoop(
                self._settings,
                context,
                session=self._session,
                clock=self._clock,
                health=self._health,
                metrics=self._metrics,
                arrived=self._arrived.put_nowait,
                connections=self._connections,
                request_interval_s=self._request_interval_s,
                known=self._known,
            )
            self._main = asyncio.current_task()
            await self._loop.run(lambda: self._started.set_result(event_loop))
        finally:
            context.destroy(linger=1000)
