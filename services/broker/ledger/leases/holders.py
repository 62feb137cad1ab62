"""What comes in under a lease: tokens, entries of the journal, the end of the episode, or the lease back."""

from protocol.messages import Chunk, Finish, Journal, Refused, Release
from protocol.messages.base import shortened
from services.broker.ledger.actions import Action, AppendChunk, Note, Offence, Reply, Save, SessionKey
from services.broker.ledger.intake import TokenFacts, check_finish, growth, journal_entry
from services.broker.ledger.leases.leases import Leases, told_ended
from services.broker.ledger.state import State, saves
from services.broker.rows import TrajectoryRow


class HolderMessages:
    """Takes what a lease's holder sends, once; what others send is answered with the end of their lease."""

    def __init__(self, state: State, leases: Leases) -> None:
        self._state = state
        self._leases = leases

    def on_chunk(self, sender: SessionKey, chunk: Chunk, facts: TokenFacts, now: float) -> list[Action]:
        state = self._state
        if self._is_finished(chunk.trajectory_id, chunk.epoch):
            return []  # delivered again after a broker restart
        row = self._leases.held(sender, chunk.trajectory_id, chunk.epoch)
        if row is None:
            return [told_ended(sender, chunk.trajectory_id, chunk.epoch, "not held by this session")]
        end = chunk.offset + chunk.num_tokens
        if row.lease_start <= chunk.offset and end <= row.num_tokens:
            return []  # delivered again after a broker restart
        if chunk.offset != row.num_tokens:
            return self._refuse(
                sender, row, "chunk", f"gap: offset is {chunk.offset}, {row.num_tokens} tokens are acknowledged"
            )
        newest = state.batches.newest
        assert newest is not None, "a lease is granted only when a version is published"
        try:
            grown = growth(
                row,
                chunk,
                facts,
                newest=newest,
                limits=state.trajectory_limits,
                sampling=state.groups.group(row.group_id).sampling,
            )
        except ValueError as error:
            return self._refuse(sender, row, "chunk", str(error))
        self._leases.moved(row.trajectory_id, now)
        return [Save(row=state.groups.append(chunk, grown)), AppendChunk(chunk=chunk, peer=sender.peer)]

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
        self._leases.moved(row.trajectory_id, now)
        return [Save(row=self._state.groups.note(row.trajectory_id, len(entry.entry))), Save(row=entry)]

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
        self._leases.moved(row.trajectory_id, now, ends=True)
        actions = saves(state.groups.finish(finish))
        group = state.groups.group(row.group_id)
        if group.status == "complete" and group.split == "train":
            actions += state.change_run(failures_in_a_row=0)
            rewards = [member.reward for member in state.groups.members(row.group_id)]
            fields = {"group_id": row.group_id, "mean_reward": sum(rewards) / len(rewards)}
            actions += [Note(event="group_complete", fields=fields), *state.sift(row.group_id)]
        return [*actions, *state.close_evaluations()]

    def on_release(self, sender: SessionKey, release: Release) -> list[Action]:
        row = self._leases.held(sender, release.trajectory_id, release.epoch)
        if row is None:
            return [told_ended(sender, release.trajectory_id, release.epoch, "not held by this session")]
        if release.failed:
            return [Offence(by=sender, reason="failed"), *self._leases.failed(sender, row, release.reason)]
        return [Save(row=self._state.groups.release(row.trajectory_id, failed=False))]

    def _is_finished(self, trajectory_id: int, epoch: int) -> bool:
        """Whether the lease of this epoch has finished the trajectory."""
        row = self._state.groups.trajectory(trajectory_id)
        return row is not None and row.status == "finished" and row.epoch == epoch

    def _refuse(self, sender: SessionKey, row: TrajectoryRow, message_type: str, reason: str) -> list[Action]:
        """What the holder sent cannot be accepted: a failed attempt, and the lease ends."""
        text = f"trajectory {row.trajectory_id}: {reason}"
        refused = Reply(to=sender, message=Refused(reason=shortened(text), message_type=message_type))
        return [refused, told_ended(sender, row.trajectory_id, row.epoch, reason), *self._leases.failed(sender, row, text)]
