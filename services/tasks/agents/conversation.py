"""What one episode says from its worker, and what it is answered."""

from __future__ import annotations

import asyncio
from collections import deque

from gspo_services.tasks.agents.journal import RecordedStep, StepJournal
from gspo_services.tasks.agents.messages import WorkerComputer, WorkerDiverged, WorkerDone, WorkerStep
from gspo_services.tasks.agents.results import AgentResult, failed
from gspo_services.tasks.agents.worker import EpisodeNews, UserWorker, WorkerEpisode
from gspo_services.tasks.computers import BadChange, ComputerAnswer, ComputerRequest, EpisodeComputer
from gspo_services.tasks.sandbox import SandboxError


class EpisodeConversation:
    """Serves one episode, in the order in which it may say things."""

    def __init__(
        self, worker: UserWorker, episode: WorkerEpisode, journal: StepJournal, computer: EpisodeComputer | None
    ) -> None:
        self._worker = worker
        self._episode = episode
        self._journal = journal
        self._computer = computer
        self._num_recorded = len(journal.recorded)
        self._next = self._num_recorded
        self._replayed = 0
        """The ordinal that the computer has come to within the recorded steps."""
        self._has_diverged = False
        self._heard: deque[EpisodeNews] = deque()

    async def until_done(self) -> WorkerDone | AgentResult:
        """Record steps and ask the computer until the episode has ended. Raises: what the journal raises."""
        while True:
            news = self._heard.popleft() if self._heard else await self._episode.news.get()
            if isinstance(news, WorkerDone | AgentResult):
                return news
            if not self._is_in_order(news):
                text = f"step {news.ordinal} of an episode came where step {self._next} was due"
                self._worker.end("bad_message", text, self._episode.number)
                return failed("bad_message", text)
            if isinstance(news, WorkerDiverged):
                self._has_diverged, self._next = True, news.ordinal
                if self._computer is not None:
                    self._computer.diverged(news.ordinal)
                await self._journal.diverged(news.ordinal, news.recorded, news.name)
            elif isinstance(news, WorkerStep):
                self._next += 1
                await self._journal.record(RecordedStep(news.name, news.arguments, news.result), news.ordinal)
                self._worker.send({"do": "recorded", "episode": self._episode.number, "ordinal": news.ordinal})
            elif (end := await self._compute(news)) is not None:
                return end

    def _is_in_order(self, news: WorkerStep | WorkerDiverged | WorkerComputer) -> bool:
        if isinstance(news, WorkerDiverged):
            before_any = self._next == self._num_recorded and not self._has_diverged
            return before_any and self._replayed <= news.ordinal < self._num_recorded
        if isinstance(news, WorkerComputer):
            if self._computer is None:
                return False
            if news.ordinal < self._next:
                return news.do != "run" and not self._has_diverged and self._replayed <= news.ordinal < self._num_recorded
        return news.ordinal == self._next

    async def _compute(self, news: WorkerComputer) -> WorkerDone | AgentResult | None:
        """Answer what the computer is asked. Returns the end of the episode where it comes first."""
        assert self._computer is not None
        is_new = news.do != "read" and news.ordinal == self._next
        asked = ComputerRequest(news.do, news.ordinal, news.command, news.timeout_s, news.files, news.path)
        try:
            answer = await self._unless_ended(self._computer, asked)
        except (SandboxError, BadChange) as error:
            # Also where the sandbox can run nothing: the next one may.
            return failed("sandbox", str(error))
        if not isinstance(answer, ComputerAnswer):
            return answer
        if is_new:
            self._next += 1
            await self._journal.record(RecordedStep(f"computer.{news.do}", news.arguments, answer.record), news.ordinal)
        elif news.ordinal < self._num_recorded:
            self._replayed = news.ordinal + (news.do == "write")
        message = {"do": "answer", "episode": self._episode.number, "request": news.request, "answer": answer.answer}
        self._worker.send(message)
        return None

    async def _unless_ended(
        self, computer: EpisodeComputer, asked: ComputerRequest
    ) -> ComputerAnswer | WorkerDone | AgentResult:
        """The computer's answer. An episode that ends meanwhile takes its command with it, and so its sandbox."""
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(_caught(computer, asked), name="computer")
            hearing = tasks.create_task(self._episode.news.get(), name="news")
            await asyncio.wait({answering, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                hearing.cancel()
            elif isinstance(end := hearing.result(), WorkerDone | AgentResult):
                answering.cancel()
                return end
            else:
                # The agent no longer waits for the command. It goes on behind it.
                self._heard.append(hearing.result())
        answer = answering.result()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def _caught(computer: EpisodeComputer, asked: ComputerRequest) -> ComputerAnswer | SandboxError | BadChange:
    """With its errors as values, which would come out of a group in another form."""
    try:
        return await computer.do(asked)
    except (SandboxError, BadChange) as error:
        return error
