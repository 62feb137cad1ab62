"""One event loop in virtual time, on which several processes run, are suspended and die."""

import asyncio
import contextvars
import heapq
import selectors
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

MAX_TURNS_AT_ONE_INSTANT = 20_000


class Stuck(RuntimeError):
    """Nothing is scheduled any more, or time does not pass."""


class Process:
    """One life of a process. While it is ``suspended``, its callbacks wait, as after SIGSTOP."""

    def __init__(self, name: str, life: int) -> None:
        self.name = name
        self.life = life
        self.session = f"{name}.{life}"
        self.suspended = False
        self.dead = False
        self.postponed: deque[asyncio.Handle] = deque()

    def __repr__(self) -> str:
        return self.session


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)
NOBODY = contextvars.Context()
"""Context of the parts that belong to no process: the network, the weather."""


def _postponed(handle: asyncio.Handle) -> bool:
    process = handle._context.get(PROCESS)
    if process is None or not process.suspended:
        return False
    process.postponed.append(handle)
    return True


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        if not _postponed(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if not _postponed(self):
            super()._run()


class _Task(asyncio.Task[Any]):
    """A task that is hashed by its number, so that every run iterates over sets of tasks in the same order."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class _Selector(selectors.SelectSelector):
    """Advances virtual time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.advance: Callable[[float | None], None] = lambda _: None

    def select(self, timeout: float | None = None) -> list[Any]:
        self.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when there is nothing else to do. Runs work for threads in the loop, a little later."""

    def __init__(self, thread_delay_s: Callable[[], float]) -> None:
        """``thread_delay_s`` returns the delay before and after a function that would run in a thread."""
        self._virtual_now = 0.0
        self._turns = 0
        self._num_tasks = 0
        self._thread_delay_s = thread_delay_s
        selector = _Selector()
        super().__init__(selector)
        selector.advance = self._advance
        self._clock_resolution = 1e-9
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._virtual_now

    def jump(self, seconds: float) -> None:
        """The whole world stands still for ``seconds``: every timer that was due meanwhile is late."""
        self._virtual_now += seconds

    def resume(self, process: Process) -> None:
        """Run what was due while the process was suspended, in its order."""
        process.suspended = False
        self._ready.extend(process.postponed)
        process.postponed.clear()

    def _advance(self, timeout: float | None) -> None:
        if timeout is None:
            raise Stuck(f"at {self._virtual_now:.3f} s nothing is scheduled any more")
        if timeout > 0:
            self._virtual_now = max(self._virtual_now, self._scheduled[0]._when)
            self._turns = 0
            return
        self._turns += 1
        if self._turns > MAX_TURNS_AT_ONE_INSTANT:
            raise Stuck(f"time does not pass at {self._virtual_now:.3f} s: a task is busy without waiting")

    def _call_soon(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, handle)
        handle._scheduled = True
        return handle

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Task[Any]":
        self._num_tasks += 1
        return _Task(self._num_tasks, coroutine, loop=loop, **options)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:  # type: ignore[override]
        """Run the function after a delay. A process that is killed during the delay has not run it."""
        return self.create_task(self._execute(function, args))

    async def _execute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        await asyncio.sleep(self._thread_delay_s())
        result = function(*args)
        await asyncio.sleep(self._thread_delay_s())
        return result
