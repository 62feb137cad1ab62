"""Rank 0's connection to the world, in a thread of its own, so that collectives never share a thread with sockets.

The training thread calls blocking methods; the thread's event loop holds the batch channel, the weight server and the
telemetry. Queues between the two are bounded; every blocking call has a timeout and ends when the link fails.
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

from protocol.messages import EndOfRun, Welcome
from services.learner.broker.exchange import REQUEST_INTERVAL_S, BatchArrived, BrokerLoop
from services.learner.metrics import LearnerMetrics
from services.learner.weights import WeightCopy
from services.runtime.clock import Clock
from services.runtime.errors import ServiceError
from services.runtime.settings import Settings
from services.runtime.telemetry import Health

log = structlog.get_logger()
T = TypeVar("T")

CALL_TIMEOUT_S: Final = 600.0


class BrokerClient:
    """Use as a context manager. Raises what ended the link from every later call.

    produces:     batches and ends of run, in order of request
    waits for:    the broker
    unblocked by: Batch, EndOfRun; the caller's timeout
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
    ) -> None:
        """``request_interval_s``: how often an unanswered request is repeated."""
        self._request_interval_s = request_interval_s
        self._settings = settings
        self._session = session
        self._clock = clock
        self._health = health
        self._metrics = metrics
        # One request is under way at a time, so there is room.
        self._arrived: queue.Queue[BatchArrived | EndOfRun] = queue.Queue(maxsize=4)
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_thread, name="learner-link", daemon=True)
        self._failure: BaseException | None = None
        self._main: asyncio.Task[None] | None = None

    def __enter__(self) -> "BrokerClient":
        self._thread.start()
        self._loop = self._started.result(timeout=CALL_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main is not None and not self._ended.done():
            # It may end by itself at this moment.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(timeout=10.0)

    # --- called by the training thread -------------------------------------------------------------------------------

    @property
    def waiting_for(self) -> str:
        """What the next batch waits for, in the broker's words."""
        return self._conversation.waiting_for

    @property
    def encoding(self) -> bool:
        """Whether a publication's digests or delta are being computed, which no broker hastens."""
        return self._conversation.encoding

    @property
    def refused(self) -> str:
        """Why the broker does not admit this learner (now), with the way out; empty while it does, or has not said so."""
        return self._conversation.refused

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        """The broker's Welcome; None when it did not come in time."""
        try:
            return self._call(self._conversation.welcome(), timeout_s)
        except TimeoutError:
            return None

    def resume(self, next_batch: int) -> None:
        """Tell the broker where the checkpoint stands: also again after each new handshake."""
        self._deliver(self._conversation.resume(next_batch))

    def request(self, index: int, policy_version: int) -> None:
        """Ask for a batch; repeated by the link until it arrives."""
        self._deliver(self._conversation.request(index, policy_version))

    def take(self, timeout_s: float) -> BatchArrived | EndOfRun | None:
        """What was requested; None when it did not come in time."""
        self._require_alive()
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            self._require_alive()
            return None

    def wait_announced(self) -> None:
        """Return when no publication is under way: then there is room for another copy of the weights."""
        while True:
            try:
                return self._call(self._conversation.announced(), CALL_TIMEOUT_S)
            except TimeoutError as error:
                if not self._conversation.encoding:
                    raise self._silence() from error

    def publish(self, policy_version: int, weights: WeightCopy, trained_batches: int) -> None:
        """Have ``weights``, which are used up, served, and then announced: a version is published only when it can be
        fetched. Returns before that; what goes wrong is raised by a later call."""
        self._deliver(self._conversation.publish(policy_version, weights, trained_batches))

    def trained(self, index: int, policy_version: int, metrics: dict[str, float | None]) -> None:
        """Report a trained batch, behind the version that came of it."""
        self._deliver(self._conversation.trained(index, policy_version, metrics))

    def mark(self) -> int:
        """A name for all publications and reports so far; see ``acknowledged``."""
        return self._call(self._conversation.mark(), CALL_TIMEOUT_S)

    def acknowledged(self, mark: int) -> bool:
        """Whether the broker has all publications and reports from before ``mark``."""
        return self._call(self._conversation.acknowledged(mark), CALL_TIMEOUT_S)

    def checkpointed(self, next_batch: int, policy_version: int) -> None:
        """Report a durable checkpoint, which is also what a later handshake says."""
        self._deliver(self._conversation.checkpointed(next_batch, policy_version))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the broker has acknowledged everything; False when it did not in time."""
        try:
            self._call(self._conversation.flushed(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _deliver(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Hand a message over; waits while the broker acknowledges nothing. Raises: ServiceError when it lasts."""
        try:
            self._call(coroutine, CALL_TIMEOUT_S)
        except TimeoutError as error:
            raise self._silence() from error

    def _silence(self) -> ServiceError:
        return ServiceError(
            f"the broker at {self._settings.broker.batch_endpoint} has acknowledged nothing for {CALL_TIMEOUT_S:.0f} s: "
            "is it running?"
        )

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``coroutine`` in the link's thread. Raises: TimeoutError; what ended the link, when it is ended or ends."""
        future = self._submit(coroutine)
        if future is not None:
            either: list[concurrent.futures.Future[Any]] = [future, self._ended]
            done, _ = concurrent.futures.wait(either, timeout_s, concurrent.futures.FIRST_COMPLETED)
            if not done:
                future.cancel()
                raise TimeoutError(f"no answer from the link within {timeout_s:.0f} s")
            if future in done and not future.cancelled():
                return future.result()
        # Its last breath can cancel the call before it is known why.
        self._ended.result()
        coroutine.close()
        raise self._end()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T] | None":
        """None: the link's loop is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            return None

    def _require_alive(self) -> None:
        if self._ended.done():
            raise self._end()

    def _end(self) -> BaseException:
        """Why there is no link any more."""
        return ServiceError("the learner's link is closed") if self._failure is None else self._failure

    # --- the link's own thread ---------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            log.debug("link_closed")
        # Whatever ended this thread is raised in the training thread by its next call.
        except BaseException as error:  # noqa: BLE001
            self._failure = error
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        context = zmq.asyncio.Context()
        loop = asyncio.get_running_loop()
        try:
            self._conversation = BrokerLoop(
                self._settings,
                context,
                session=self._session,
                clock=self._clock,
                health=self._health,
                metrics=self._metrics,
                arrived=self._arrived.put_nowait,
                request_interval_s=self._request_interval_s,
            )
            self._main = asyncio.current_task()
            await self._conversation.run(lambda: self._started.set_result(loop))
        finally:
            context.destroy(linger=1000)
