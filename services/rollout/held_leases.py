"""The leases that a rollout holds, and whether they make progress."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gspo_protocol.messages import Grade, Lease, LeaseKey
from gspo_services.rollout.broker import Brokers
from gspo_services.rollout.work import EpisodeWork


@dataclass(frozen=True, kw_only=True)
class HeldLease:
    """A lease, and the task that works on it."""

    lease: Lease | Grade
    work: EpisodeWork
    task: asyncio.Task[None]


def num_by_broker(held: Mapping[int, HeldLease], brokers: Brokers) -> list[int]:
    """Count the leases of each broker."""
    numbers = [0] * len(brokers)
    for trajectory_id in held:
        numbers[brokers.of(trajectory_id)] += 1
    return numbers


def keys_by_broker(held: Mapping[int, HeldLease], brokers: Brokers) -> list[list[LeaseKey]]:
    """Return the leases of each broker."""
    keys: list[list[LeaseKey]] = [[] for _ in range(len(brokers))]
    for trajectory_id, each in held.items():
        keys[brokers.of(trajectory_id)].append(LeaseKey(trajectory_id, each.lease.epoch))
    return keys


class WorkSeen:
    """The episodes' progress at the last look."""

    def __init__(self) -> None:
        self._last: list[tuple[int, int, int]] = []

    def has_worked(self, held: Iterable[HeldLease]) -> bool:
        """Return whether any episode started, ended or grew since the last look; also true without any episode."""
        work = [
            (each.lease.trajectory_id, each.lease.epoch, each.work.num_tokens)
            for each in held
            if not each.work.is_in_user_code
        ]
        worked = not work or work != self._last
        self._last = work
        return worked
