"""Messages under a lease: tokens, journal entries, the end of the episode, or the lease handed back."""

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Final

from gspo_protocol.messages import Chunk, Finish, Graded, Journal, Refused, Release
from gspo_protocol.messages.base import shortened
from gspo_protocol.messages.gathered import Chunks, Gathered
from gspo_protocol.messages.stretches import Stretch, StretchColumns
from gspo_services.broker.ledger.actions import Action, AppendChunk, AppendChunks, Note, Offence, Reply, Save, SessionKey
from gspo_services.broker.ledger.intake import (
    TokenFacts,
    check_finish,
    check_graded,
    growth,
    journal_entry,
    require_experts,
)
from gspo_services.broker.ledger.leases.leases import Leases, told_ended
from gspo_services.broker.ledger.state import State, saves
from gspo_services.broker.rows import TrajectoryRow, VersionRow

NO_VERSION: Final = "a lease is granted only when a version is published"


class HolderMessages:
    """Takes each message of a lease's holder once; tells any other sender that its lease has ended."""

    def __init__(self, state: State, leases: Leases) -> None:
        self._state = state
        self._leases = leases

    def on_tokens(
        self, sender: SessionKey, message: Chunk | Chunks, facts: TokenFacts | Gathered | None, now: float
    ) -> list[Action]:
        """Take one chunk, or many. ``facts``: about the chunk's tokens, or the content of the message."""
        if isinstance(message, Chunks):
            assert isinstance(facts, Gathered), "many chunks are handed in as they are read"
            return self.on_chunks(sender, facts, now)
        assert isinstance(facts, TokenFacts), "a chunk is handed in with what is known of its tokens"
        return self.on_chunk(sender, message, facts, now)

    def on_chunk(self, sender: SessionKey, chunk: Chunk, facts: TokenFacts, now: float) -> list[Action]:
        row = self._before(sender, chunk.trajectory_id, chunk.epoch, chunk.offset, chunk.num_tokens)
        if not isinstance(row, TrajectoryRow):
            return row
        try:
            grown = self._grown(row, chunk, facts)
        except ValueError as error:
            return self._refuse_chunk(sender, row, str(error))
        self._leases.moved((row.trajectory_id,), now)
        return [Save(row=grown), AppendChunk(chunk=chunk, peer=sender.peer)]

    def on_chunks(self, sender: SessionKey, chunks: Gathered, now: float) -> list[Action]:
        """Take usual chunks of many trajectories together, then the others one by one, in order: a refused chunk
        does not affect the others.
        """
        is_taken, due = self._extend(sender, chunks.stretch_columns)
        together = list(compress(chunks.stretches, is_taken))
        taken = AppendChunks(chunks=chunks, peer=sender.peer, stretches=together, rows=due)
        self._leases.moved([stretch.trajectory_id for stretch in together], now)
        others = [place for place, taken in enumerate(is_taken) if not taken]
        actions = [taken, *self._one_after_another(sender, chunks, others, now)]
        return [each for each in actions if not isinstance(each, AppendChunks) or each.stretches]

    def _extend(self, sender: SessionKey, stretches: StretchColumns) -> tuple[list[bool], list[TrajectoryRow]]:
        """Which of these stretches are taken as they are, and rows to be written with them."""
        newest = self._state.batches.newest
        if newest is None:  # So nothing is leased.
            return [False] * len(stretches.offset), []
        taken = self._state.groups.extend(sender, stretches, newest, self._state.trajectory_limits)
        return taken.is_taken, taken.due

    def _one_after_another(self, sender: SessionKey, chunks: Gathered, places: Iterable[int], now: float) -> list[Action]:
        """Take the stretches that were not taken together."""
        actions: list[Action] = []
        taken = AppendChunks(chunks=chunks, peer=sender.peer)
        ended: set[tuple[int, int]] = set()
        moved: set[int] = set()
        for place in places:
            lease = trajectory_id, _ = chunks.stretches[place][1:3]
            if lease in ended:
                continue
            for stretch, found in self._steps(sender, chunks, place):
                if isinstance(found, list):
                    if found:
                        # Later chunks may write this trajectory's row again: after those before it.
                        ended.add(lease)
                        actions += [taken, *found]
                        taken = AppendChunks(chunks=chunks, peer=sender.peer)
                        break
                    continue
                taken.stretches.append(stretch)
                if found is not None:
                    taken.rows.append(found)
                if trajectory_id not in moved:
                    # At once: a later chunk may end this lease, which then must stay ended.
                    moved.add(trajectory_id)
                    self._leases.moved((trajectory_id,), now)
        return [*actions, taken]

    def _steps(
        self, sender: SessionKey, chunks: Gathered, place: int
    ) -> Iterator[tuple[Stretch, TrajectoryRow | list[Action] | None]]:
        """A stretch as a whole, or its chunks, each decided when it is asked for: the row to be written with it, None for a
        row that may be behind, or what follows because it is not taken.
        """
        stretch = chunks.stretches[place]
        if stretch.is_usual:
            (is_taken,), due = self._extend(sender, chunks.stretch_columns.only(place))
            if is_taken:
                yield stretch, due[0] if due else None
                return
        for each in stretch.places:
            alone = chunks.alone(each)
            yield alone, self._gathered(sender, chunks, each, alone)

    def _gathered(self, sender: SessionKey, chunks: Gathered, place: int, alone: Stretch) -> TrajectoryRow | list[Action]:
        row = self._before(sender, alone.trajectory_id, alone.epoch, alone.offset, alone.num_tokens, place)
        if not isinstance(row, TrajectoryRow):
            return row
        try:
            chunk, _ = chunks.chunk(place)
            return self._grown(row, chunk, TokenFacts(largest_token_id=chunks.largest_token_id(place)))
        except ValueError as error:
            return self._refuse_chunk(sender, row, str(error), place)

    def _before(
        self, sender: SessionKey, trajectory_id: int, epoch: int, offset: int, num_tokens: int, place: int | None = None
    ) -> TrajectoryRow | list[Action]:
        """The row that a chunk goes on from, or what follows because it goes on from none. ``place``: of one among many."""
        if self._is_finished(trajectory_id, epoch):
            return []  # delivered again after a broker restart
        row = self._leases.held(sender, trajectory_id, epoch)
        if row is None:
            return [told_ended(sender, trajectory_id, epoch, "not held by this session")]
        if row.lease_start <= offset and offset + num_tokens <= row.num_tokens:
            return []  # delivered again after a broker restart
        if offset != row.num_tokens:
            reason = f"gap: offset is {offset}, {row.num_tokens} tokens are acknowledged"
            return self._refuse_chunk(sender, row, reason, place)
        return row

    def _grown(self, row: TrajectoryRow, chunk: Chunk, facts: TokenFacts) -> TrajectoryRow:
        """The row with a chunk that follows. Raises: ValueError when it must not be taken."""
        state = self._state
        sampling = state.groups.group(row.group_id).sampling
        require_experts(facts, state.run.experts, state.groups.expert_rows.get(row.trajectory_id, ()))
        grown = growth(row, chunk, facts, newest=self._newest, limits=state.trajectory_limits, sampling=sampling)
        return state.groups.append(chunk, grown, facts.expert_row)

    @property
    def _newest(self) -> VersionRow:
        newest = self._state.batches.newest
        assert newest is not None, NO_VERSION
        return newest

    def on_journal(self, sender: SessionKey, message: Journal, now: float) -> list[Action]:
        if self._is_finished(message.trajectory_id, message.epoch):
            return []  # delivered again after a broker restart
        row = self._leases.held(sender, message.trajectory_id, message.epoch)
        if row is None:
            return [told_ended(sender, message.trajectory_id, message.epoch, "not held by this session")]
        if message.place < row.num_entries:
            return []  # delivered again after a broker restart
        try:
            entry = journal_entry(row, message)
        except ValueError as error:
            return self._refuse(sender, row, "journal", str(error))
        self._leases.moved((row.trajectory_id,), now)
        return [Save(row=self._state.groups.note(row.trajectory_id, len(entry.entry))), Save(row=entry)]

    def on_end(self, sender: SessionKey, message: Finish | Graded, now: float) -> list[Action]:
        """Take the end of an episode, or the rewards of a whole group."""
        return self.on_finish(sender, message, now) if isinstance(message, Finish) else self.on_graded(sender, message)

    def on_finish(self, sender: SessionKey, finish: Finish, now: float) -> list[Action]:
        state = self._state
        if self._is_finished(finish.trajectory_id, finish.epoch):
            return []  # delivered again after a broker restart
        row = self._leases.held(sender, finish.trajectory_id, finish.epoch)
        if row is None:
            return [told_ended(sender, finish.trajectory_id, finish.epoch, "not held by this session")]
        try:
            check_finish(row, finish)
        except ValueError as error:
            return self._refuse(sender, row, "finish", str(error))
        self._leases.moved((row.trajectory_id,), now, ends=True)
        grades = state.config.grades_groups and state.groups.group(row.group_id).split == "train"
        actions = saves(state.groups.finish(finish, grades=grades))
        return [*actions, *self._after_end(row), *state.close_evaluations()]

    def on_graded(self, sender: SessionKey, graded: Graded) -> list[Action]:
        """Take the rewards of a whole group, all at once."""
        known = self._state.groups.trajectory(graded.trajectory_id)
        if known is not None and known.status == "finished" and known.epoch == graded.epoch:
            return []  # delivered again after a broker restart
        row = self._leases.held(sender, graded.trajectory_id, graded.epoch)
        if row is None:
            return [told_ended(sender, graded.trajectory_id, graded.epoch, "not held by this session")]
        try:
            check_graded(graded, self._state.groups.members(row.group_id))
        except ValueError as error:
            return self._refuse(sender, row, "graded", str(error))
        return [*saves(self._state.groups.grade(graded, row.group_id)), *self._after_end(row)]

    def _after_end(self, row: TrajectoryRow) -> list[Action]:
        """What follows from the end of a trajectory if it has completed its group."""
        state = self._state
        group = state.groups.group(row.group_id)
        if group.status != "complete" or group.split != "train":
            return []
        rewards = [member.reward for member in state.groups.members(row.group_id)]
        fields = {"group_id": row.group_id, "mean_reward": sum(rewards) / len(rewards)}
        complete = Note(event="group_complete", fields=fields)
        return [*state.change_run(failures_in_a_row=0), complete, *state.sift(row.group_id)]

    def on_release(self, sender: SessionKey, release: Release) -> list[Action]:
        row = self._leases.held(sender, release.trajectory_id, release.epoch)
        if row is None:
            return [told_ended(sender, release.trajectory_id, release.epoch, "not held by this session")]
        if release.failed:
            return [Offence(by=sender, reason="failed"), *self._leases.failed(sender, row, release.reason)]
        return [Save(row=self._state.groups.release(row.trajectory_id, failed=False))]

    def _is_finished(self, trajectory_id: int, epoch: int) -> bool:
        """Whether the lease of this epoch has finished the trajectory, or its episode."""
        row = self._state.groups.trajectory(trajectory_id)
        return row is not None and row.finish_reason is not None and row.status != "leased" and row.epoch == epoch

    def _refuse_chunk(self, sender: SessionKey, row: TrajectoryRow, reason: str, place: int | None = None) -> list[Action]:
        if place is None:
            return self._refuse(sender, row, "chunk", reason)
        return self._refuse(sender, row, "chunks", f"chunks[{place}]: {reason}")

    def _refuse(self, sender: SessionKey, row: TrajectoryRow, message_type: str, reason: str) -> list[Action]:
        """Refuse a holder's message: the attempt has failed, and the lease ends."""
        text = f"trajectory {row.trajectory_id}: {reason}"
        refused = Reply(to=sender, message=Refused(reason=shortened(text), message_type=message_type))
        return [refused, told_ended(sender, row.trajectory_id, row.epoch, reason), *self._leases.failed(sender, row, text)]
