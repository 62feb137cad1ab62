"""The leases that a rollout holds, and whether they make progress."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from gspo_protocol.messages import Grade, Lease
from gspo_services.rollout.work import EpisodeWork


@dataclass(frozen=True, kw_only=True)
class HeldLease:
    """A lease, and the task that works on it."""

    lease: Lease | Grade
    work: EpisodeWork
    task: asyncio.Task[None]


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
