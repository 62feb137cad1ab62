"""The worker: it reads what the parent sends, and runs up to as many episodes at once as the parent starts."""

import asyncio
import faulthandler
import os
import sys
from collections.abc import Callable
from typing import Any

from .episodes import RunningEpisode
from .failures import cut, described, explained_import
from .frames import FrameSocket
from .imports import find_function, load_agents
from .limits import allow_cpu, limit_process
from .monitor import LoopMonitor
from .prints import EpisodePrints, current_episode

UNUSABLE = 1


def serve(settings: "dict[str, Any]") -> None:
    """Be a worker until the parent goes away."""
    frames = FrameSocket()
    limit_process(settings["limits"])
    # The last words of a crash: they go to the parent past everything that the user's code may replace.
    faulthandler.enable(file=2, all_threads=False)
    prints = EpisodePrints(1, lambda episode, text: say_output(frames, episode, text), settings["output_chars"])
    sys.stdout = sys.stderr = prints
    worker = Worker(frames, prints, settings)
    frames.listen(worker.receive)
    agents = load_agents(settings["agents"])
    try:
        function = find_function(settings["function"])
    except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may also call sys.exit
        frames.send({"say": "unusable", "detail": explained_import(error, settings["function"])})
        os._exit(UNUSABLE)
    worker.run(function, agents)


def say_output(frames: FrameSocket, episode: "int | None", text: str) -> None:
    """Send what was printed, in pieces that a frame carries."""
    for begin in range(0, len(text), 64 * 1024):
        piece = text[begin : begin + 64 * 1024].encode("utf-8", "replace").decode()
        frames.send({"say": "output", "episode": episode, "text": piece})


class Worker:
    """The event loop and its episodes."""

    _function: "Callable[..., Any]"
    _agents: Any

    def __init__(self, frames: FrameSocket, prints: EpisodePrints, settings: "dict[str, Any]") -> None:
        self._frames = frames
        self._prints = prints
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._running: dict[int, tuple[RunningEpisode, asyncio.Task[Any]]] = {}
        self._owners: dict[Any, int] = {}

    def receive(self, message: "dict[str, Any]") -> None:
        """Take a message of the parent, in any thread; its turn comes as soon as the loop runs."""
        self._loop.call_soon_threadsafe(self._receive, message)

    def run(self, function: "Callable[..., Any]", agents: Any) -> None:
        """Never returns: the parent ends this process."""
        self._function, self._agents = function, agents
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._owned_task)
        LoopMonitor(self._loop, self._frames, self._owners, self._settings["heartbeat_s"]).start()
        self._frames.send({"say": "ready"})
        self._loop.run_forever()
        os._exit(0)  # the user's code has stopped the loop

    def _receive(self, message: "dict[str, Any]") -> None:
        number = message["episode"]
        if message["do"] == "start":
            allow_cpu(self._settings["limits"].get("cpu_s"))
            token = current_episode.set(number)
            try:
                running = RunningEpisode(self._loop, self._frames, message, self._agents)
                self._running[number] = (running, self._loop.create_task(self._solve(running)))
            finally:
                current_episode.reset(token)
        elif number in self._running:
            running, task = self._running[number]
            if message["do"] == "cancel":
                task.cancel()
            elif message["do"] == "answer":
                running.record.answered(message["request"], message["answer"])
            else:
                running.record.durable(message["ordinal"])

    async def _solve(self, running: RunningEpisode) -> None:
        try:
            outcome = await running.run(self._function)
        except BaseException as error:  # noqa: BLE001 - cancelled before it began, or a mistake of ours: it has to be said
            outcome = {"failure": "cancelled", "detail": described(error)}
        self._running.pop(running.number, None)
        mine = asyncio.current_task()
        # What the user's code has started and does not wait for would run on at the cost of others.
        for task in [task for task, owner in self._owners.items() if owner == running.number and task is not mine]:
            task.cancel()
        self._prints.end(running.number)
        ended = {"reward": None, "components": None, "turns": None, "failure": None, "detail": "", "spent": False, **outcome}
        ended["detail"] = cut(ended["detail"])
        self._frames.send({"say": "done", "episode": running.number, **ended})

    def _owned_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        """A task that is known to belong to the episode that makes it."""
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        owner = current_episode.get()
        if owner is not None:
            self._owners[task] = owner
            task.add_done_callback(lambda ended: self._owners.pop(ended, None))
        return task
