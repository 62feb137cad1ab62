"""One worker process from the parent's side: its connection, its episodes, and the judgement that ends it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog

import gspo.tasks.agents
from gspo_services.tasks.agents.messages import (
    WorkerAlive,
    WorkerComputer,
    WorkerDiverged,
    WorkerDone,
    WorkerMessage,
    WorkerPrinted,
    WorkerReady,
    WorkerStep,
    WorkerUnusable,
    decoded,
)
from gspo_services.tasks.agents.options import (
    WORKER_FILE,
    AgentPoolOptions,
    process_limits,
    user_environment,
    worker_command,
)
from gspo_services.tasks.agents.output import UserOutput
from gspo_services.tasks.agents.results import AgentFailure, AgentResult, failed
from gspo_services.tasks.supervised import BadMessage, SupervisedProcess

log = structlog.get_logger(__name__)

_NOBODYS_FAULT: Final = ("closed", "not_started", "unknown_function")
_MOST_WAITING: Final = 64
"""Steps of one episode that wait for their record; an honest agent waits for each."""


EpisodeNews = WorkerStep | WorkerComputer | WorkerDiverged | WorkerDone | AgentResult
"""What an episode hears: from its worker, or the result that the worker's end means for it."""


class WorkerEpisode:
    """One episode in a worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.news: asyncio.Queue[EpisodeNews] = asyncio.Queue()
        self.is_done = False
        self.must_end_at: float | None = None
        """When its worker is killed because it has not ended (the loop's time)."""


class UserWorker:
    """A worker process. ``run`` is its whole life; episodes enter and leave meanwhile.

    produces:     news for each episode; its place when the process has ended it
    waits for:    messages of the process, and its end
    unblocked by: start_timeout_s; the look at each heartbeat, which kills; ``end``
    """

    def __init__(
        self,
        function: str,
        options: AgentPoolOptions,
        output: UserOutput,
        free: Callable[[], None],
        *,
        takes_one: bool = False,
    ) -> None:
        """``free`` is called whenever an episode's place is free again. ``takes_one``: only one episode may ever enter."""
        self._function = function
        self._most_episodes = 1 if takes_one else options.max_episodes_per_worker
        self._options = options
        self._write_output = output.write
        self._free = free
        self._process = SupervisedProcess(lambda text: output.write(f"worker {self._process.pid}", text))
        self._episodes: dict[int, WorkerEpisode] = {}
        self._num_begun = 0
        self._verdict: tuple[AgentFailure, str, int | None] | None = None
        self._spent = self._has_started = False
        self._heard_at = self._looked_at = self._waited_s = 0.0
        self._looking: asyncio.TimerHandle | None = None
        self.ready = asyncio.Event()
        """Set when episodes can start, and also when none ever will."""
        self.ended = asyncio.Event()

    @property
    def has_started(self) -> bool:
        """Whether it was ready, and episodes could begin."""
        return self._has_started

    @property
    def load(self) -> int:
        """Episodes in it, also those that are still ending."""
        return len(self._episodes)

    @property
    def takes_more(self) -> bool:
        """Whether new episodes may enter."""
        return not self._spent and self._verdict is None and self._num_begun < self._most_episodes

    @property
    def end_result(self) -> AgentResult | None:
        """What the end of the process means for an episode; None while it runs."""
        return None if self._verdict is None else failed(*self._verdict[:2])

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it that was not ours, such as that of a kernel without memory."""
        crashed = self._verdict is not None and self._verdict[0] == "crashed"
        return crashed and (self._process.returncode or 0) < 0

    def enter(self) -> WorkerEpisode:
        """A new episode, which has a place in this worker from now on."""
        self._num_begun += 1
        episode = self._episodes[self._num_begun] = WorkerEpisode(self._num_begun)
        return episode

    def send(self, message: bytes | dict[str, Any]) -> None:
        """Send a message, unless the process has ended: then the episode's news say so."""
        self._process.send(message if isinstance(message, bytes) else msgspec.json.encode(message))

    def leave(self, episode: WorkerEpisode) -> None:
        """The episode is given up: its code is cancelled, and the worker is killed if it does not end."""
        if episode.is_done or episode.number not in self._episodes:
            return
        if self.ready.is_set():
            self.send({"do": "cancel", "episode": episode.number})
            episode.must_end_at = asyncio.get_running_loop().time() + self._options.grace_s
        else:
            self._drop(episode.number)

    def end(self, reason: AgentFailure, detail: str, culprit: int | None = None) -> None:
        """Begin to end the process. Its episodes fail with ``reason``; with a ``culprit``, the others as "crashed"."""
        if self._verdict is None:
            self._verdict = (reason, detail, culprit)
        self._process.kill()

    async def run(self) -> None:
        """Start the process and hear it until its end. Nothing that it does raises an error here."""
        own_python = self._options.python is not None
        try:
            async with user_environment(self._options, own_python=own_python) as environment:
                try:
                    await self._converse(environment)
                except BadMessage as error:
                    self.end("bad_message", str(error))
                except ConnectionError:
                    log.debug("user_worker_connection_ended", pid=self._process.pid)
                except asyncio.CancelledError:
                    self.end("closed", "the workers are closed")
                    raise
                finally:
                    self._spent = True  # who enters from here on would only hear of its end
                    await self._process.end()
        except OSError as error:
            self._verdict = self._verdict or ("not_started", f"the worker cannot be started: {error}", None)
        finally:
            self.conclude()

    async def _converse(self, environment: dict[str, str]) -> None:
        settings = {
            "function": self._function, "agents": gspo.tasks.agents.__file__, "limits": process_limits(self._options),
            "heartbeat_s": self._options.heartbeat_s, "output_chars": self._options.output_chars,
        }  # fmt: skip
        command = worker_command(self._options.python or sys.executable, json.dumps(settings))
        await self._process.start_to_talk(command, environment)
        if self._verdict is None:
            await self._hear()

    async def _received(self) -> WorkerMessage:
        return decoded(await self._process.receive())

    async def _hear(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                while not isinstance(message := await self._received(), WorkerReady):
                    if not isinstance(message, WorkerPrinted | WorkerUnusable):
                        raise BadMessage("a worker that has not said that it is ready speaks of episodes")
                    self._take(message)
        except TimeoutError:
            self.end("not_started", f"the worker was not ready within {self._options.start_timeout_s} s")
            return
        self._has_started = True
        self.ready.set()
        self._heard_at = self._looked_at = loop.time()
        self._waited_s = self._process.waited_s()
        self._look()
        try:
            while True:
                self._take(await self._received())
        finally:
            if self._looking is not None:
                self._looking.cancel()

    def _take(self, message: WorkerMessage) -> None:
        """Judge one message and pass it on. Raises: BadMessage."""
        self._heard_at, self._waited_s = asyncio.get_running_loop().time(), self._process.waited_s()
        match message:
            case WorkerPrinted(episode=None, text=text):
                self._write_output(f"worker {self._process.pid}", text)
            case WorkerPrinted(episode=number, text=text):
                self._write_output(f"worker {self._process.pid} episode {number}", text)
            case WorkerUnusable(detail=detail):
                self.end("unknown_function", detail)
            case WorkerAlive(late_s=late_s, episode=number, where=where):
                if late_s > self._options.hang_s:
                    self.end("hung", f"the agent's code has blocked the event loop for {late_s:.1f} s in\n{where}", number)
            case WorkerReady():
                raise BadMessage("a worker is ready once")
            case _:
                self._take_of_episode(message)

    def _take_of_episode(self, message: WorkerStep | WorkerComputer | WorkerDiverged | WorkerDone) -> None:
        episode = self._episodes.get(message.episode)
        if episode is None:
            raise BadMessage(f"episode {message.episode} is none of the worker's")
        if episode.news.qsize() >= _MOST_WAITING:
            raise BadMessage(f"episode {message.episode} does not wait for its steps to be recorded")
        episode.news.put_nowait(message)
        if isinstance(message, WorkerDone):
            episode.is_done = True
            self._spent = self._spent or message.spent
            self._drop(message.episode)

    def _look(self) -> None:
        """Kill the process if it, or an episode in it, does not end what it must. Called at each heartbeat."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._looked_at > 2 * self._options.heartbeat_s + 1.0:
            # This process itself was held up: what the worker said meanwhile is still to be read.
            self._heard_at = now
        self._looked_at = now
        late = [
            episode for episode in self._episodes.values() if episode.must_end_at is not None and episode.must_end_at < now
        ]
        silent_s = now - self._heard_at - (self._process.waited_s() - self._waited_s)
        if self._process.returncode is not None and silent_s > self._options.heartbeat_s:
            # Something that it has started holds the connection open.
            self.end("crashed", self._crash())
        elif late:
            text = f"the episode's code did not end within {self._options.grace_s} s of its cancellation"
            self.end("deadline", text, late[0].number)
        elif silent_s > self._options.hang_s + self._options.heartbeat_s:
            # Not even its threads run: C code that keeps the interpreter's lock, or a process that is stopped.
            self.end("hung", f"the worker has not been heard for {silent_s:.1f} s")
        else:
            self._looking = loop.call_later(self._options.heartbeat_s, self._look)

    def _drop(self, number: int) -> None:
        del self._episodes[number]
        self._free()
        if not self._episodes and not self.takes_more:
            self.end("closed", "the worker has had all its episodes")

    def _crash(self) -> str:
        # The interpreter's report of a crash lists our frames behind the user's.
        lines = [line for line in self._process.tail.splitlines() if str(WORKER_FILE.parent) not in line]
        last = "\n".join(["; its last output:", *lines]) if lines else ""
        return f"the worker ended by itself ({self._process.ended_as()}){last}"

    def conclude(self) -> None:
        """Let every episode that is left know what the end of the process means for it. A second call does nothing."""
        if self.ended.is_set():
            return
        reason, detail, culprit = self._verdict or ("crashed", self._crash(), None)
        self._verdict = (reason, detail, culprit)
        in_company = len(self._episodes) > 1 and reason not in _NOBODYS_FAULT
        for number, episode in list(self._episodes.items()):
            if culprit is None:
                episode.news.put_nowait(failed(reason, detail, in_company=in_company))
            elif culprit == number:
                episode.news.put_nowait(failed(reason, detail))
            else:
                text = f"another episode ended the worker ({reason}): {detail}"
                episode.news.put_nowait(failed("crashed", text, in_company=in_company))
            del self._episodes[number]
            self._free()
        self.ready.set()
        self.ended.set()
        if reason != "closed":
            log.warning("user_worker_ended", pid=self._process.pid, reason=reason, detail=detail)
