"""Takes what an episode sends as a run's broker does, and refuses what it would refuse. Nothing is stored."""

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec.structs import replace

from gspo_protocol.codec import Array, decode, encode
from gspo_protocol.limits import trajectory_limits
from gspo_protocol.messages import Chunk, Finish, Graded, Journal, Lease, Message
from gspo_services.broker.ledger import TokenFacts, check_finish, grown_row, growth, journal_entry
from gspo_services.broker.rows import TrajectoryRow, VersionRow
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.shared.schedules import sampling_of
from gspo_services.shared.settings import Settings

VERSION: Final = 1
"""The policy version of everything that is tried."""


class LocalIntake:
    """The ``EpisodeIntake`` of episodes that are played one after another."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        """``vocabulary``: the number of the model's tokens."""
        self._sampling = sampling_of(settings.sampling)
        self._limits = trajectory_limits(settings.batch.groups_per_batch * settings.batch.group_size)
        self._newest = VersionRow(
            policy_version=VERSION, endpoint="", digest="", num_bytes=1, trained_batches=0, vocabulary=vocabulary
        )
        self._row: TrajectoryRow | None = None
        self.chunks: list[tuple[Chunk, Mapping[str, Array]]] = []
        """The chunks of the episode that began last, in order."""
        self.finish: Finish | None = None
        """Its end; None until it has ended, or if it never does."""
        self.graded: Graded | None = None
        """The rewards of the group that was compared last."""

    def begin(self, lease: Lease) -> None:
        """Start another episode; everything about the one before is forgotten."""
        self._row = TrajectoryRow(
            trajectory_id=lease.trajectory_id,
            group_id=lease.group_id,
            status="leased",
            epoch=lease.epoch,
            lease_version=VERSION,
        )
        self.chunks = []
        self.finish = None

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """Take a message of the episode.

        Raises: ProtocolError for an invalid message; EpisodeFailed for one that a broker would refuse.
        """
        received = decode([bytes(frame) for frame in encode(message, arrays)])
        try:
            self._take(received.message, received.arrays)
        except ValueError as error:
            raise EpisodeFailed(f"a run's broker would refuse this {type(message).__name__}: {error}") from error

    @property
    def last_answer(self) -> Array:
        """The tokens that the policy sampled for the last turn of the finished episode, int32 [T]."""
        assert self._row is not None
        assert self.finish is not None
        turn = replace(self._row, discarded_turns=tuple(self.finish.discarded_turns)).last_turn
        found = [np.zeros(0, "<i4")]
        for chunk, arrays in self.chunks:
            marks = [segment.kind == "action" and segment.turn == turn for segment in chunk.segments]
            found.append(arrays["token_ids"][np.repeat(marks, [segment.num_tokens for segment in chunk.segments])])
        return np.concatenate(found)

    async def acknowledged(self) -> None:
        """Return at once: everything sent was taken."""

    def _take(self, message: Message, arrays: Mapping[str, Array]) -> None:
        assert self._row is not None, "an episode sends before it has begun"
        match message:
            case Chunk():
                grown = growth(
                    self._row,
                    message,
                    TokenFacts(largest_token_id=int(arrays["token_ids"].max())),
                    newest=self._newest,
                    limits=self._limits,
                    sampling=self._sampling,
                )
                self._row = grown_row(self._row, message, grown)
                self.chunks.append((message, arrays))
            case Journal():
                entry = journal_entry(self._row, message)
                self._row = replace(
                    self._row,
                    num_entries=self._row.num_entries + 1,
                    journal_bytes=self._row.journal_bytes + len(entry.entry),
                )
            case Finish():
                check_finish(self._row, message)
                self.finish = message
            case Graded():
                self.graded = message
            case _:
                raise AssertionError(f"no episode sends a {type(message).__name__}")
