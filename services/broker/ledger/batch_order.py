"""Decides which batch and which version come next, and which publications, trainings and checkpoints fit that order."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from msgspec.structs import replace

from gspo_protocol.limits import MAX_COMPONENTS
from gspo_protocol.messages import Checkpointed, GroupSampling, Published, Trained, TrainingValues
from gspo_services.broker.ledger.intake import check_published, check_trained
from gspo_services.broker.ledger.lengths import length_stats
from gspo_services.broker.ledger.sampling import has_equal_rewards
from gspo_services.broker.rows import (
    BatchRow,
    BatchStats,
    CheckpointedRow,
    LedgerContents,
    Row,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)

REMEMBERED: Final = 64
"""Publications and trainings kept to recognise one that is delivered again: more than the channel's window."""


class Batches:
    """The batches and versions of a run: dense batch indices, growing versions.

    ``next_version`` is the version at which the next new batch will be assembled: each batch that is assembled but not yet
    part of the newest weights will bring one more publication. A learner that restarts publishes nothing before it has
    trained as many batches as the newest version, so that a restart alone changes no version.
    """

    def __init__(self, contents: LedgerContents) -> None:
        self._batches: dict[int, BatchRow] = {row.index: row for row in contents.batches}
        self._versions: dict[int, VersionRow] = {row.policy_version: row for row in contents.versions}
        self.newest_version = max(self._versions, default=0)
        """0 before the first publication."""
        self._trained: list[TrainedRow] = list(contents.trained)
        self.num_assembled = max(self._batches, default=-1) + 1
        self.checkpointed = contents.next_batch_checkpointed

    @property
    def newest(self) -> VersionRow | None:
        """The newest publication; None before the first."""
        return self._versions.get(self.newest_version)

    @property
    def num_trained(self) -> int:
        """Batches that the newest published weights were trained on."""
        return self.newest.trained_batches if self.newest is not None else 0

    @property
    def next_version(self) -> int:
        return self.newest_version + self.num_assembled - self.num_trained

    def is_next_to_be_published(self, policy_version: int) -> bool:
        """Whether the learner has these weights and only their announcement is missing, because it is training already.

        A batch is assembled for them anyway: admission counts assembled batches, not announcements. Only one announcement
        may be missing. If the learner dies before it, the version stays reserved and the batch keeps it: no other weights
        ever get that number.
        """
        under_way = self.num_assembled - self.num_trained == 1 and self.newest is not None
        return under_way and policy_version == self.next_version

    @property
    def last(self) -> BatchRow | None:
        return self._batches.get(self.num_assembled - 1)

    def batch(self, index: int) -> BatchRow | None:
        """An assembled batch that no checkpoint covers, or the last one."""
        return self._batches.get(index)

    def assemble(
        self,
        policy_version: int,
        groups: Sequence[Sequence[TrajectoryRow]],
        samplings: Sequence[GroupSampling],
        values: TrainingValues,
        pass_rates: dict[str, float],
        num_filtered_groups: int = 0,
        num_filtered_tokens: int = 0,
        *,
        by_turn: bool = False,
    ) -> BatchRow:
        """Record the next batch, and what was filtered out while it filled. ``samplings``: how each of ``groups`` was
        sampled. ``by_turn``: advantages are made of each turn's rewards, and not of their sum."""
        stats = batch_stats(policy_version, groups, by_turn=by_turn)
        row = BatchRow(
            index=self.num_assembled,
            policy_version=policy_version,
            group_ids=tuple(members[0].group_id for members in groups),
            samplings=tuple(samplings),
            values=values,
            stats=replace(
                stats,
                adapters=_mean_rewards(groups, samplings),
                pass_rates=pass_rates,
                num_filtered_groups=num_filtered_groups,
                num_filtered_tokens=num_filtered_tokens,
            ),
        )
        self._batches[row.index] = row
        self.num_assembled += 1
        self._prune()
        return row

    def publish(self, published: Published) -> list[Row]:
        """Take a new version, or the newest one from another endpoint; returns no rows for one that is delivered again.

        Raises: ValueError for a number that other weights have, for weights trained on fewer batches than the newest, or on
        batches that do not exist, and what ``check_published`` refuses.
        """
        row = VersionRow(
            policy_version=published.policy_version,
            endpoint=published.endpoint,
            digest=published.digest,
            num_bytes=published.num_bytes,
            trained_batches=published.trained_batches,
            vocabulary=published.vocabulary,
        )
        known = self._versions.get(row.policy_version)
        if known == row:
            return []
        if known is not None and known is self.newest and replace(known, endpoint=row.endpoint) == row:
            check_published(published, known)
            self._versions[row.policy_version] = row
            return [row]
        if row.policy_version <= self.newest_version:
            raise ValueError(
                f"policy_version is {row.policy_version}, but {self.newest_version} is published: versions are never "
                f"reused; publish {self.newest_version + 1} (Welcome.policy_version + 1)"
            )
        check_published(published, self.newest)
        if row.trained_batches > self.num_assembled:
            raise ValueError(f"trained_batches is {row.trained_batches}: only {self.num_assembled} batches exist")
        if row.trained_batches < self.num_trained:
            raise ValueError(
                f"trained_batches is {row.trained_batches}, but version {self.newest_version} was trained on "
                f"{self.num_trained}: train the batches between again first (Welcome.trained_batches)"
            )
        self._versions[row.policy_version] = row
        self.newest_version = row.policy_version
        if len(self._versions) > REMEMBERED:
            del self._versions[min(self._versions)]
        return [row]

    def train(self, trained: Trained) -> list[Row]:
        """Note that a batch was trained; returns no rows for a message that is delivered again, and for a batch that was
        checkpointed so long ago that only its tokens are still known: its record is complete.

        Raises: ValueError when there is no such batch, when it must have made a version, or for metrics that
        ``check_trained`` refuses.
        """
        if trained.index >= self.num_assembled:
            raise ValueError(f"index is {trained.index}: only {self.num_assembled} batches exist")
        if not trained.policy_version and trained.index >= self.num_trained - 1:
            raise ValueError(f"policy_version is 0: batch {trained.index} makes a version")
        check_trained(trained)
        how: Literal["trained", "skipped"] = "skipped" if trained.skipped else "trained"
        row = TrainedRow(index=trained.index, policy_version=trained.policy_version, how=how)
        if row in self._trained or (not row.policy_version and row.index not in self._batches):
            return []
        # In the order in which they are read back.
        self._trained = sorted([*self._trained, row], key=lambda row: (row.policy_version, row.index))[-REMEMBERED:]
        return [row]

    def was_trained(self, index: int) -> bool:
        """Whether the batch was trained before."""
        return index < self.num_trained - 1 or any(row.index == index for row in self._trained)

    def checkpoint(self, checkpointed: Checkpointed) -> list[Row]:
        """Note that a checkpoint covers more batches. Raises: ValueError when it covers batches that do not exist."""
        if checkpointed.next_batch > self.num_assembled:
            raise ValueError(f"next_batch is {checkpointed.next_batch}: only {self.num_assembled} batches exist")
        if checkpointed.next_batch <= self.checkpointed:
            return []
        self.checkpointed = checkpointed.next_batch
        self._prune()
        return [CheckpointedRow(next_batch=self.checkpointed)]

    def _prune(self) -> None:
        for index in [index for index in self._batches if index < min(self.checkpointed, self.num_assembled - 1)]:
            del self._batches[index]

    def resume(self, next_batch: int) -> list[Row]:
        """Resume from a checkpoint of the batches below ``next_batch``: later batches are delivered again.

        Raises: ValueError when this run has not assembled as many batches.
        """
        if next_batch > self.num_assembled:
            raise ValueError(
                f"the checkpoint covers {next_batch} batches, this run has assembled {self.num_assembled}: "
                "checkpoint and ledger belong to different runs; check run.directory"
            )
        if next_batch >= self.checkpointed:
            return []
        self.checkpointed = next_batch
        return [CheckpointedRow(next_batch=next_batch)]


def batch_stats(policy_version: int, groups: Sequence[Sequence[TrajectoryRow]], *, by_turn: bool = False) -> BatchStats:
    """Statistics of a batch assembled at ``policy_version``; every trajectory has action tokens."""
    rows = [row for members in groups for row in members]
    lags = [policy_version - row.version_sum / row.num_action_tokens for row in rows]
    return BatchStats(
        num_groups=len(groups),
        num_trajectories=len(rows),
        num_tokens=sum(row.num_tokens for row in rows),
        num_action_tokens=sum(row.num_action_tokens for row in rows),
        mean_reward=sum(row.reward for row in rows) / len(rows),
        mean_lag=sum(lags) / len(rows),
        max_lag=max(policy_version - row.min_version for row in rows),
        num_zero_advantage_groups=sum(has_equal_rewards(members, by_turn=by_turn) for members in groups),
        components=_mean_components(rows),
        lengths=length_stats(rows),
    )


def _mean_rewards(groups: Sequence[Sequence[TrajectoryRow]], samplings: Sequence[GroupSampling]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for members, sampling in zip(groups, samplings, strict=True):
        if sampling.adapter:
            found.setdefault(sampling.adapter, []).extend(row.reward for row in members)
    return {name: sum(found[name]) / len(found[name]) for name in sorted(found)}


def _mean_components(rows: Iterable[TrajectoryRow]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.components.items():
            found.setdefault(name, []).append(value)
    # Names come from peers: those that most trajectories have, so that none can make a metric of thousands.
    most = sorted(found, key=lambda name: (-len(found[name]), name))[:MAX_COMPONENTS]
    return {name: sum(found[name]) / len(found[name]) for name in sorted(most)}
