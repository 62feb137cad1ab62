"""Reads a run of several brokers as one, with one snapshot of each ledger."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gspo_services.broker.rows import BatchStats, LengthStats
from gspo_services.broker.store import reading
from gspo_services.runs.ledgers import broker_name
from gspo_services.runs.reading import (
    MetricsLines,
    OpenRun,
    RecordedBatch,
    RecordedGroup,
    RecordedTokens,
    RecordedTrajectory,
    RunFacts,
)

EVERYWHERE: Final = ("num_groups", "num_trajectories", "num_tokens", "num_action_tokens", "num_zero_advantage_groups",
                     "num_filtered_groups", "num_filtered_tokens")  # fmt: skip


@contextmanager
def open_shared_run(directory: Path, ledgers: Sequence[Path]) -> Iterator[OpenRun]:
    """See ``open_run``, for the run in ``directory`` whose brokers have their ledgers in ``ledgers``. Raises: NoLedger."""
    with ExitStack() as stack:
        yield SharedRun(directory, [OpenRun(each, stack.enter_context(reading(each))) for each in ledgers])


class SharedRun(OpenRun):
    """A run of several brokers at the moment of opening; the ledgers of a live run are not of one moment.

    An id determines its broker, so anything with an id is read from one ledger. Settings, publications, evaluations, lines
    and ``select`` come from broker 0. The lines of batches are the same everywhere.
    """

    def __init__(self, directory: Path, parts: Sequence[OpenRun]) -> None:
        """``parts``: each broker's ledger, in their order."""
        super().__init__(directory, parts[0].connection)
        self._parts = tuple(parts)

    def facts(self) -> RunFacts:
        found = [part.facts() for part in self._parts]
        return replace(
            found[0],
            is_live=any(each.is_live for each in found),
            num_batches=min(each.num_batches for each in found),
            num_trained=min(each.num_trained for each in found),
            num_groups=max(each.num_groups for each in found),
            num_trajectories=max(each.num_trajectories for each in found),
            stop_reason=next((each.stop_reason for each in found if each.stop_reason), ""),
            error=next((f"{broker_name(number)}: {each.error}" for number, each in enumerate(found) if each.error), ""),
        )

    def other_lines(self) -> list[MetricsLines]:
        return [part.lines() for part in self._parts[1:]]

    def parts(self) -> list[OpenRun]:
        return list(self._parts)

    # --- batches ------------------------------------------------------------------------------------------------------

    def batches(self, first: int = 0, end: int | None = None) -> Iterator[RecordedBatch]:
        """Yield the batches of which every broker has its share."""
        for shares in zip(*(part.batches(first, end) for part in self._parts), strict=False):
            yield _whole(shares)

    def batch(self, index: int) -> RecordedBatch | None:
        """Return one batch; None when not every broker has its share of it (yet)."""
        shares = [part.batch(index) for part in self._parts]
        known = [share for share in shares if share is not None]
        return _whole(known) if len(known) == len(shares) else None

    # --- groups and trajectories --------------------------------------------------------------------------------------

    def groups(self, **chosen: Any) -> Iterator[RecordedGroup]:
        yield from heapq.merge(*(part.groups(**chosen) for part in self._parts), key=lambda group: group.group_id)

    def group(self, group_id: int) -> RecordedGroup | None:
        return self._owner(group_id).group(group_id)

    def trajectories(self, first: int = 0, end: int | None = None) -> Iterator[RecordedTrajectory]:
        found = (part.trajectories(first, end) for part in self._parts)
        yield from heapq.merge(*found, key=lambda trajectory: trajectory.trajectory_id)

    def trajectory(self, trajectory_id: int) -> RecordedTrajectory | None:
        return self._owner(trajectory_id).trajectory(trajectory_id)

    def tokens(self, trajectory_id: int) -> RecordedTokens:
        return self._owner(trajectory_id).tokens(trajectory_id)

    def journal(self, trajectory_id: int) -> list[bytes]:
        return self._owner(trajectory_id).journal(trajectory_id)

    def _owner(self, number: int) -> OpenRun:
        return self._parts[number % len(self._parts)]


def _whole(shares: Sequence[RecordedBatch]) -> RecordedBatch:
    """The groups in the order in which the learner gets them. Lag is counted from the newest version of the shares."""
    quarantined = [(number, share.quarantined) for number, share in enumerate(shares) if share.quarantined]
    return replace(
        shares[0],
        policy_version=max(share.policy_version for share in shares),
        group_ids=tuple(group_id for share in shares for group_id in share.group_ids),
        stats=_stats([share.stats for share in shares]),
        trained_versions=max((share.trained_versions for share in shares), key=len),
        quarantined="; ".join(f"share of {broker_name(number)}: {reason}" for number, reason in quarantined),
    )


def _stats(parts: Sequence[BatchStats]) -> BatchStats:
    """Average over trajectories; the merged 95 % length is the largest of the shares'."""
    weights = [part.num_trajectories for part in parts]
    lengths = [part.lengths for part in parts]
    return BatchStats(
        **{name: sum(getattr(part, name) for part in parts) for name in EVERYWHERE},
        mean_reward=_mean([part.mean_reward for part in parts], weights),
        mean_lag=_mean([part.mean_lag for part in parts], weights),
        max_lag=max(part.max_lag for part in parts),
        components=_means([part.components for part in parts], weights),
        lengths=LengthStats(
            mean=_mean([each.mean for each in lengths], weights),
            p95=max(each.p95 for each in lengths),
            max=max(each.max for each in lengths),
            cut_off=_mean([each.cut_off for each in lengths], weights),
        ),
        pass_rates=_means([part.pass_rates for part in parts], weights),
    )


def _means(parts: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    found = {}
    for name in sorted(frozenset().union(*parts)):
        known = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        found[name] = _mean([value for value, _ in known], [weight for _, weight in known])
    return found


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
