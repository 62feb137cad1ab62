"""Runs one episode: the user's function as a task of the loop or as a thread, to its result, deadline or cancellation."""

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from .failures import described, is_a
from .frames import FrameSocket
from .reward_value import agent_outcome_of


class RecordOverPipe:
    """Records an episode's steps at the parent, which also has its computer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, frames: FrameSocket, number: int) -> None:
        self._loop = loop
        self._frames = frames
        self._number = number
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = 0
        self.ended = False

    async def record(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        """Send the step; return when the parent says that it is durable."""
        if self.ended:
            raise RuntimeError(f'step "{name}" comes after the end of its episode')
        waiting = self._waiting[ordinal] = self._loop.create_future()
        step = {"ordinal": ordinal, "name": name, "arguments": arguments, "result": result}
        self._frames.send({"say": "step", "episode": self._number, **step})
        await waiting

    def record_now(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        """The same from a thread."""
        asyncio.run_coroutine_threadsafe(self.record(name, arguments, ordinal, result), self._loop).result()

    async def ask(self, request: "dict[str, Any]") -> "dict[str, Any]":
        """What the episode's computer answers."""
        if self.ended:
            raise RuntimeError("the computer is asked after the end of its episode")
        self._num_asked += 1
        number = self._num_asked
        waiting: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._asked[number] = waiting
        self._frames.send({"say": "computer", "episode": self._number, "request": number, **request})
        return await waiting

    def ask_now(self, request: "dict[str, Any]") -> "dict[str, Any]":
        """The same from a thread."""
        return asyncio.run_coroutine_threadsafe(self.ask(request), self._loop).result()

    def answered(self, number: int, answer: "dict[str, Any]") -> None:
        """The parent's answer to a request."""
        waiting = self._asked.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        """Tell the parent, before the step that differs."""
        message = {"say": "diverged", "episode": self._number, "ordinal": ordinal, "recorded": recorded, "name": name}
        if not self.ended:
            self._frames.send(message)

    def durable(self, ordinal: int) -> None:
        """The parent has recorded the step."""
        waiting = self._waiting.pop(ordinal, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def end(self) -> None:
        """Nothing more is recorded; a thread that waits for it is let go."""
        self.ended = True
        for waiting in self._waiting.values():
            waiting.cancel()
        for asked in self._asked.values():
            asked.cancel()


class RunningEpisode:
    """One episode of this worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, frames: FrameSocket, message: "dict[str, Any]", agents: Any) -> None:
        self.number: int = message["episode"]
        self._loop = loop
        self._deadline_s: float = message["deadline_s"]
        self._thread: threading.Thread | None = None
        self._over = False
        self.record = RecordOverPipe(loop, frames, self.number)
        self.episode = agents.Episode(
            **{key: message[key] for key in ("task", "seed", "base_url", "api_key", "model", "roles")},
            ends_at=time.monotonic() + self._deadline_s,
            recorded=[tuple(step) for step in message["recorded"]],
            record=self.record,
            computer=self.record if message["has_computer"] else None,
        )

    async def run(self, function: "Callable[..., Any]") -> "dict[str, Any]":
        """Run it to its end, whatever end that is, and say how it ended."""
        task = asyncio.current_task()
        assert task is not None
        deadline = self._loop.call_later(self._deadline_s, self._expire, task)
        try:
            value = await function(self.episode) if is_async(function) else await self._in_thread(function)
            if inspect.isawaitable(value):
                value = await value
            outcome = agent_outcome_of(value)
        except MemoryError as error:
            # Who asked for too much memory is not known: others of this worker may have most of it.
            outcome = {"failure": "memory", "detail": described(error), "spent": True}
        except asyncio.CancelledError as error:
            outcome = {"failure": "cancelled", "detail": described(error)}
        except BaseException as error:  # noqa: BLE001 - this is the user's code: sys.exit ends its episode, not the worker
            outcome = {"failure": "raised", "detail": described(error)}
        deadline.cancel()
        self.record.end()
        if self._over and "failure" in outcome:
            outcome = {
                **outcome,
                "failure": "deadline",
                "detail": f"not done after {self._deadline_s} s\n{outcome['detail']}",
            }
        if self._thread is not None and self._thread.is_alive():
            # A thread cannot be ended; it ends with the worker, which gets no more episodes.
            outcome["spent"] = True
        return outcome

    def _expire(self, task: "asyncio.Task[Any]") -> None:
        self._over = True
        task.cancel()

    async def _in_thread(self, function: "Callable[..., Any]") -> Any:
        """The result of a plain function, in a thread of its own: a pool of threads would let some episodes wait."""
        result: asyncio.Future[Any] = self._loop.create_future()
        context = contextvars.copy_context()

        def settle(value: Any, error: "BaseException | None") -> None:
            if result.done():
                return
            if error is not None and is_a(error, (StopIteration, SystemExit, KeyboardInterrupt)):
                # A future cannot hold the first, and the others would end the loop.
                error = RuntimeError(described(error))
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def work() -> None:
            try:
                value, error = context.run(function, self.episode), None
            except BaseException as caught:  # noqa: BLE001 - it is raised again in the loop
                value, error = None, caught
            self._loop.call_soon_threadsafe(settle, value, error)

        self._thread = threading.Thread(target=work, name=f"episode-{self.number}", daemon=True)
        self._thread.start()
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            result.cancel()
            raise
        self._thread.join()
        return result.result()


def is_async(function: "Callable[..., Any]") -> bool:
    """Whether calling it gives a coroutine: an ``async def``, or an object with one as ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
