"""The calls of one agent's episode: where each continues, its replay from an earlier run, and the end."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Literal, TypeVar

import structlog

from gspo_protocol.codec import Array
from gspo_protocol.messages import Finish, Lease
from gspo_protocol.messages.journal import entries_in
from gspo_services.rollout.endpoint import CallAnswer, CallDelta, CallRefused, CallRequest
from gspo_services.rollout.episodes.budget import Budget
from gspo_services.rollout.episodes.history import Conversation, Histories
from gspo_services.rollout.episodes.live import LiveCall
from gspo_services.rollout.episodes.log import EpisodeLog, Round
from gspo_services.rollout.episodes.parsed_answer import answer_key, answer_of
from gspo_services.rollout.episodes.place import Known, find_place
from gspo_services.rollout.episodes.records import CallRecord, read_journal
from gspo_services.rollout.episodes.registry import ENDED
from gspo_services.rollout.episodes.roles import WrongTurns, rewards_of_roles
from gspo_services.rollout.episodes.sampler import CallSampler
from gspo_services.rollout.episodes.shared import EpisodeShared
from gspo_services.rollout.episodes.steps import EpisodeSteps
from gspo_services.rollout.episodes.writer import EpisodeWriter
from gspo_services.rollout.sglang import EngineError
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.tasks.agents import RecordedStep
from gspo_services.tasks.computers import loses_files

log = structlog.get_logger()
T = TypeVar("T")

REMEDY: Final = "an agent's calls must follow from its task, its seed and the results of its steps"
NO_COMPONENTS: Final[Mapping[str, float]] = {}
_FAILED: Final = "this episode has failed on this rollout; another rollout repeats it, or it is dropped"


class EpisodeCalls:
    """One episode, from its lease to its Finish.

    produces:     answers; chunks, journal entries and a Finish on the work channel
    waits for:    the engine and its weight updates; credit on the work channel
    unblocked by: tokens; the broker's acknowledgements; ``close``

    ``tasks`` owns running calls: a call continues when its client has gone away, and the same request finds it again.
    """

    def __init__(self, lease: Lease, arrays: Mapping[str, Array], shared: EpisodeShared, tasks: asyncio.TaskGroup) -> None:
        """Raises: EpisodeFailed when the lease's journal does not belong to its tokens."""
        entries = entries_in(arrays)
        self.log = EpisodeLog(lease, arrays)
        recorded = read_journal(entries, self.log)
        self.temperature = lease.sampling.temperature
        self._shared = shared
        self._tasks = tasks
        self._writer = EpisodeWriter(self.log, entries, shared.broker, shared.metrics)
        self._replays = shared.on_replay == "replay" and not self._has_lost_files(recorded.steps)
        steps = recorded.steps if self._replays else []
        self.steps = EpisodeSteps(self.log.trajectory_id, self._writer, steps, shared.metrics)
        self._budget = Budget(self.log, lease.sampling, shared.limits)
        self._sampler = CallSampler(shared, self.log, self._writer, self._budget, lease)
        self._histories = Histories()
        self._unrepeated = recorded.calls
        self._num_calls = len(recorded.calls)
        self._asked: list[tuple[CallRecord, Round]] = []
        """What the agent asked for, in its order: where it repeats an earlier run's calls, theirs may be another."""
        self._live: dict[LiveCall, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._work: asyncio.Timeout | None = None
        self._closed = False

    def _has_lost_files(self, steps: Sequence[RecordedStep]) -> bool:
        """Whether the files of the agent's computer cannot be made again: then the episode begins again from its task."""
        lost = next((number for number, step in enumerate(steps) if loses_files(step.name, step.result)), None)
        if lost is not None:
            log.warning(
                "episode_begins_again", trajectory_id=self.log.trajectory_id, step=lost,
                meaning="a command changed more files than the journal keeps, and the episode's rollout has ended since",
            )  # fmt: skip
        return lost is not None

    async def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        """See ``Calls.call``. Raises: CallRefused."""
        self._require_open()
        live = LiveCall(request)
        # A client that lost its connection asks again: sampling twice would leave an answer that no one has seen.
        live = next((each for each in self._live if not each.is_followed and each.digest == live.digest), live)
        if live not in self._live:
            self._live[live] = self._tasks.create_task(self._answer(live), name=f"call-{self.log.trajectory_id}")
        async with aclosing(live.follow()) as pieces:
            try:
                async for piece in pieces:
                    yield piece
            except CallRefused:
                self._live.pop(live, None)
                raise
        # Not together with the answer: it may get lost on its way to the agent, which then asks again.
        self._live.pop(live, None)

    def can_demand(self, request: CallRequest) -> bool:
        """See ``Calls.can_demand``. A stop string within the opening would end the answer before it is sampled."""
        opening = self._opening(request)
        text = self._shared.renderer.text(opening or ())
        return opening is not None and not any(stop in text for stop in request.stop)

    async def count(self, request: CallRequest) -> int:
        """See ``Calls.count``. Raises: CallRefused."""
        return len((await find_place(self._shared.renderer, request, (), is_first=True)).observation)

    def _opening(self, request: CallRequest) -> list[int] | None:
        if request.must_call is None:
            return []
        return self._shared.renderer.call_opening(request.must_call, request.tools, request.template_arguments)

    async def while_whole(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``; cancel it when a call breaks the episode. Raises: EpisodeFailed; EngineError."""
        try:
            async with asyncio.timeout(None) as self._work:
                self._end_work_if_failed()
                result = await work
        except Exception:
            # Also where the work failed by itself, because its calls were refused from then on.
            self._require_whole()
            raise
        finally:
            self._work = None
        self._require_whole()
        return result

    async def close(self) -> None:
        """Refuse further calls, and end running ones; their sampled tokens are in the log."""
        self._closed = True
        running = [task for task in self._live.values() if not task.done()]
        for task in running:
            task.cancel("the episode has ended")
        if running:
            await asyncio.wait(running)

    async def until_sampled(self) -> None:
        """Wait until every running call has what the engine makes for it."""
        if running := [task for task in self._live.values() if not task.done()]:
            await asyncio.wait(running)

    async def hand_back(self) -> None:
        """Close, and send what another rollout needs to continue. Raises: EpisodeFailed."""
        await self.close()
        async with self._writer.alone() as writer:
            await writer.tokens()

    @property
    def is_sampling(self) -> bool:
        """Whether a call is under way."""
        return any(not task.done() for task in self._live.values())

    async def finish(
        self,
        reward: float,
        reason: Literal["done", "length"] = "done",
        components: Mapping[str, float] = NO_COMPONENTS,
        turns: Sequence[float] | None = None,
    ) -> None:
        """Close, and send the end. ``turns``: the reward of each answer, in the order of the agent's calls; None: the reward
        is that of the last turn, and no earlier one has any.

        Calls of an earlier run that were not repeated are not part of this episode: their turns are discarded.
        Raises: WrongTurns; EpisodeFailed when there is nothing to train on, or the broker would not take the reward.
        """
        await self.close()
        self._require_whole()
        discarded = sorted(part.turn for _, part in self._unrepeated if part.turn is not None)
        kept = [turn for turn in range(self.log.num_turns) if turn not in set(discarded)]
        if not kept:
            raise EpisodeFailed("the agent has made no call: there are no sampled tokens to train on")
        rewards = [0.0] * self.log.num_turns
        answered = [part.turn for _, part in self._asked if part.turn is not None]
        if turns is not None and len(turns) != len(answered):
            raise WrongTurns(
                f'it rewards {len(turns)} turns ("turns"), and the policy answered {len(answered)} times: give a number for '
                "each answer, in the order of the calls"
            )
        roles = self._roles_of_turns()
        if turns is not None:
            given = dict(zip(answered, turns, strict=True))
        elif roles:
            given = rewards_of_roles(reward, components, self._shared.roles, {roles[turn]: turn for turn in kept})
        else:
            given = {kept[-1]: reward}
        for turn, own in given.items():
            rewards[turn] = own
        try:
            finish = Finish(
                trajectory_id=self.log.trajectory_id,
                epoch=self.log.epoch,
                num_tokens=self.log.num_tokens,
                reason=reason,
                turn_rewards=rewards,
                discarded_turns=discarded,
                components=dict(components),
                turn_roles=roles,
            )
        except ValueError as error:
            raise EpisodeFailed(f"no reward: {error}") from error
        self._count_unrepeated(len(discarded))
        await self._writer.finish(finish)
        self._shared.metrics.episodes.labels(outcome=reason).inc()

    def _roles_of_turns(self) -> list[int]:
        """Return the role of each turn; none where there is one."""
        roles = [0] * self.log.num_turns if self._shared.roles else []
        for record, part in (*self._asked, *self._unrepeated) if roles else ():
            if part.turn is not None:
                roles[part.turn] = record.role
        return roles

    def _count_unrepeated(self, num_turns: int) -> None:
        self._shared.metrics.turns_discarded.inc(num_turns)
        if self._unrepeated and self._replays:
            self._shared.metrics.divergences.inc()
            log.warning(
                "agent_diverged", trajectory_id=self.log.trajectory_id, discarded_turns=num_turns,
                first_call=self._unrepeated[0][0].ordinal, remedy=REMEDY,
            )  # fmt: skip

    # --- one call ----------------------------------------------------------------------------------------------------

    async def _answer(self, live: LiveCall) -> None:
        """Conclude ``live``, whatever happens."""
        try:
            live.conclude(await self._answered(live))
        except CallRefused as error:
            live.conclude(error)
        except (EpisodeFailed, EngineError) as error:
            self._fail(live, error)
        except Exception as error:
            log.exception("call_failed", trajectory_id=self.log.trajectory_id)
            self._fail(live, error)
        finally:
            live.conclude(CallRefused(410, "episode_ended", ENDED))

    def _fail(self, live: LiveCall, error: Exception) -> None:
        """Fail the episode with its call: the tokens cannot continue here."""
        self._failure = self._failure or error
        live.conclude(CallRefused(503, "episode_failed", _FAILED))
        self._end_work_if_failed()

    def _end_work_if_failed(self) -> None:
        # Once: concurrent calls fail together, and an expired timeout must not be set again.
        if self._failure is not None and self._work is not None and self._work.when() is None:
            self._work.reschedule(asyncio.get_running_loop().time())

    async def _answered(self, live: LiveCall) -> CallAnswer:
        record, part = self._recorded(live) or await self._begun(live)
        self._asked.append((record, part))
        try:
            cut = await self._sampler.sample(live, record, part)
        finally:
            self._budget.release(record.ordinal)
        answer, problem = answer_of(self._shared.renderer, live.request, record, part, cut=cut)
        if problem is not None:
            # The agent sees the text as the model wrote it. Untrained models do this all the time.
            self._shared.metrics.unparsed_calls.inc()
            log.debug("tool_call_not_parsed", trajectory_id=self.log.trajectory_id, call=record.ordinal, problem=problem)
        if part is self.log.sequences[record.sequence].rounds[-1]:
            conversation = Conversation(path=(*live.keys, answer_key(answer)), setting=live.setting)
            self._histories.answered(record.sequence, conversation)
        return answer

    def _recorded(self, live: LiveCall) -> tuple[CallRecord, Round] | None:
        """Return what an earlier run of the episode has of this call. Equal calls come in the order of their first time.

        A call is identified by its whole content, so repeated calls may come in any order, and new ones need not wait.
        """
        if not self._replays:
            return None
        for place, (record, part) in enumerate(self._unrepeated):
            if record.digest == live.digest:
                del self._unrepeated[place]
                self._shared.metrics.calls_replayed.inc()
                num_sampled = len(part.action_ids)
                self._budget.promise(record.ordinal, record.max_tokens - num_sampled, has_begun=num_sampled > 0)
                return record, part
        return None

    async def _begun(self, live: LiveCall) -> tuple[CallRecord, Round]:
        """A new call: recorded, its observation in the log, and both sent before anything is sampled."""
        async with self._writer.alone() as writer:
            known = self._known(live)
            found = await find_place(self._shared.renderer, live.request, known, is_first=not self.log.sequences)
            opening = self._opening(live.request) or []
            observation = [*found.observation, *opening]
            # Afterwards, because the episode may end or fail while a thread renders.
            self._require_open()
            self._budget.require_call()
            if not writer.has_room_for_call:
                raise CallRefused(400, "too_many_calls", "this episode's journal is full: end the episode here")
            sequence = self._new_sequence(found.reason) if found.sequence is None else found.sequence
            before = len(self.log.sequences[sequence]) if sequence < len(self.log.sequences) else 0
            record = CallRecord(
                ordinal=self._num_calls,
                sequence=sequence,
                digest=live.digest,
                id=f"chatcmpl-{secrets.token_hex(12)}",
                created=int(self._shared.wall_s()),
                max_tokens=self._budget.room(before, len(observation), live.request.max_tokens),
                opening=len(opening),
                role=live.request.role,
            )
            self._histories.taken(sequence)
            self._budget.promise(record.ordinal, record.max_tokens, has_begun=False)
            # The record first: tokens without one could not be matched to a call.
            await writer.entry(record.entry())
            part = self.log.observe(sequence, observation)
            self._num_calls += 1
            self._shared.metrics.tokens.labels(kind="observation").inc(len(observation))
            await writer.tokens()
        return record, part

    def _known(self, live: LiveCall) -> list[Known]:
        """Return the sequences that the call may continue."""
        return [
            Known(sequence=sequence, num_messages=num_messages, last=self.log.sequences[sequence].rounds[-1])
            for sequence, num_messages in self._histories.continued(live.keys, live.setting)
        ]

    def _new_sequence(self, reason: str) -> int:
        self._budget.require_new_sequence()
        self._shared.metrics.contexts.labels(reason=reason).inc()
        return len(self.log.sequences)

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _require_open(self) -> None:
        if self._closed:
            raise CallRefused(410, "episode_ended", ENDED)
        if self._failure is not None:
            raise CallRefused(503, "episode_failed", _FAILED)
