"""Of several brokers each gives a share of every batch: the shares become one batch. Pure: no sockets, no clock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import structlog
from msgspec.structs import replace

from gspo_protocol.messages import Batch, EndOfRun, SkipBatch
from gspo_protocol.messages.base import shortened
from gspo_services.learner.broker import Answer, BatchAnnounced, PartArrived

log = structlog.get_logger()

NUM_TRAJECTORIES: Final = "num_trajectories"
"""The weight of a share in a mean."""
VERSIONS_APART: Final = "lag/max_between_shares"
"""In the report of a batch whose shares were assembled at different versions: by how many."""


def merged(shares: Mapping[int, BatchAnnounced]) -> BatchAnnounced:
    """One batch of the shares, by the number of the broker that has each: their items end to end, in the brokers' order.

    A single share is the batch, as it is. ``policy_version`` is the largest: they differ only where a learner came back with
    other weights after some brokers had assembled their shares; then the report says by how much (``versions_apart``).
    The parts of the shares follow in the same order; see ``first_parts`` for their numbers. The last part of each share may
    be short. The batch has the first share's values of the schedules: shares differ in them where settings were changed
    after some brokers had assembled theirs, which are durable.

    Raises: ValueError for shares of different batches, or of one group.
    """
    numbers = sorted(shares)
    if len(numbers) == 1:
        return shares[numbers[0]]
    batches = [shares[number].batch for number in numbers]
    first = batches[0]
    owners: dict[int, int] = {}
    for number, batch in zip(numbers, batches, strict=True):
        if batch.index != first.index:
            raise ValueError(
                f"broker {number} gives a share of batch {batch.index}, and broker {numbers[0]} one of batch {first.index}"
            )
        if batch.values != first.values:
            log.warning(
                "scheduled_values_differ",
                batch=first.index,
                **{f"broker_{numbers[0]}": str(first.values), f"broker_{number}": str(batch.values)},
                trained_with=f"broker {numbers[0]}",
                hint="expected once after a change of settings; else give every broker of a run the same configuration",
            )
        for group in {item.group_id for item in batch.items}:
            if owners.setdefault(group, number) != number:
                raise ValueError(
                    f"brokers {owners[group]} and {number} both have group {group} in batch {batch.index}: broker.number "
                    "decides whose a group is; was one of the two started with another's number?"
                )
    versions = [batch.policy_version for batch in batches]
    report = merged_report([batch.report for batch in batches])
    if min(versions) < max(versions):
        report[VERSIONS_APART] = max(versions) - min(versions)
    whole = Batch(
        index=first.index,
        policy_version=max(versions),
        part_tokens=max(batch.part_tokens for batch in batches),
        items=[item for batch in batches for item in batch.items],
        values=first.values,
        report=report,
    )
    arrays = {name: np.concatenate([shares[number].arrays[name] for number in numbers]) for name in Batch.ARRAYS}
    without = {number: np.zeros(len(shares[number].arrays["turn_rewards"]), np.uint8) for number in numbers}
    for name in Batch.OPTIONAL_ARRAYS:
        if any(name in shares[number].arrays for number in numbers):
            arrays[name] = np.concatenate([shares[each].arrays.get(name, without[each]) for each in numbers])
    whole.check_arrays(arrays)
    return BatchAnnounced(batch=whole, arrays=arrays)


def versions_apart(batch: Batch) -> int:
    """How many versions older a token may be than batch.max_lag allows: its share's version is so much older than the
    batch's. Its broker counted its lag from the version of the share."""
    return int(batch.report.get(VERSIONS_APART) or 0)


def first_parts(shares: Mapping[int, BatchAnnounced]) -> dict[int, int]:
    """By broker: the number that the first part of its share has in the batch that ``merged`` makes of the shares."""
    found, at = {}, 0
    for number in sorted(shares):
        found[number] = at
        at += shares[number].batch.num_parts
    return found


def renumbered(arrived: PartArrived, first: int) -> PartArrived:
    """A part of a share as one of the batch, with the share's first part at ``first``. Its digest stays that of the share's
    part: compare it before."""
    if not first:
        return arrived
    return PartArrived(part=replace(arrived.part, part=first + arrived.part.part), arrays=arrived.arrays)


def merged_skip(skips: Mapping[int, SkipBatch]) -> SkipBatch:
    """By broker: why its share was quarantined. The whole batch is skipped when all are."""
    numbers = sorted(skips)
    first = skips[numbers[0]]
    reasons = {number: skips[number].reason for number in numbers}
    if len(set(reasons.values())) == 1:
        return first
    text = "; ".join(f"broker {number}: {reason}" for number, reason in reasons.items())
    return SkipBatch(index=first.index, reason=shortened(text))


def merged_answers(streams: Sequence[Iterable[Answer]]) -> Iterator[Answer]:
    """One stream of what K brokers have of one batch, in their order: what ``BrokerPort.take`` gives, without sockets.

    Each of ``streams`` is what one broker has: a BatchAnnounced and then its parts in order, or a SkipBatch, or an EndOfRun.
    The result is a BatchAnnounced of all shares and then their parts, numbered on; a SkipBatch if all are quarantined; the
    first EndOfRun if there is any. Each stream's first answer is read at once, its parts only when it is their turn. One
    stream is passed on as it is.

    Raises: ValueError for a share that is quarantined after its announcement, and what ``merged`` raises.
    """
    iterators = [iter(stream) for stream in streams]
    firsts = [next(iterator) for iterator in iterators]
    for first in firsts:
        if isinstance(first, EndOfRun):
            yield first
            return
    shares = {number: first for number, first in enumerate(firsts) if isinstance(first, BatchAnnounced)}
    if not shares:
        yield merged_skip({number: first for number, first in enumerate(firsts) if isinstance(first, SkipBatch)})
        return
    yield merged(shares)
    for number, at in first_parts(shares).items():
        for arrived in iterators[number]:
            if not isinstance(arrived, PartArrived):
                raise ValueError(f"broker {number}: {arrived} came in place of a part of batch {shares[number].batch.index}")
            yield renumbered(arrived, at)


def merged_report(reports: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """What the lines of metrics of a batch's shares say together.

    Names that begin with ``num_`` are counts and add up; those whose last part is or begins with ``max`` are the largest of
    the shares'; all others are means over trajectories. None counts as if the share did not have the name.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for report in reports:
        weight = report.get(NUM_TRAJECTORIES) or 0.0
        for name, value in report.items():
            if value is not None:
                found.setdefault(name, []).append((value, weight))
    return {name: _together(name, values) for name, values in found.items()}


def _together(name: str, values: Sequence[tuple[float, float]]) -> float:
    """``values``: each with its share's number of trajectories."""
    plain = [value for value, _ in values]
    if name.startswith("num_"):
        return sum(plain)
    if name.rpartition("/")[2].startswith("max") or min(plain) == max(plain):
        return max(plain)
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else sum(plain) / len(plain)
