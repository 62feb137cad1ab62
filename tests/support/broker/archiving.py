"""A broker whose ledger is archived."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.retention import Retention
from gspo_services.broker.rows import TrajectoryRow
from gspo_services.broker.store.payload import Payload
from gspo_services.broker.store.reader import LEDGER_FILE, reading
from gspo_services.broker.store.store import RowChanges, Store
from gspo_services.shared.runtime.clock import MonotonicClock


class Killed(BaseException):
    """The broker's process ends here."""


def a_store(run: Path) -> Store:
    return Store(run / LEDGER_FILE, fingerprint="f", run_id="run")


class Archiving:
    """A broker that does nothing but archive."""

    def __init__(self, run: Path, *, keep_batches: int = 1, file_bytes: int | None = None) -> None:
        """``file_bytes``: None: everything that can go, in one file."""
        self.run = run
        if file_bytes is None:
            with a_store(run) as store:
                groups = ", ".join(str(group_id) for group_id in expected_groups(run, 1))
                file_bytes = 8 * store.number(f"SELECT sum(num_tokens) FROM trajectories WHERE group_id IN ({groups})")
        self.metrics = BrokerMetrics(CollectorRegistry())
        self.retention = Retention(
            run / LEDGER_FILE, self.metrics, MonotonicClock(), keep_batches=keep_batches, file_bytes=file_bytes
        )
        self.steps = 0
        self.commits: list[RowChanges] = []

    def until(self, done: Callable[[], bool], killed_at: int = 0) -> None:
        """Archive until ``done``, or until the process is killed before its step number ``killed_at``."""
        asyncio.run(self._until(done, killed_at))

    async def _until(self, done: Callable[[], bool], killed_at: int) -> None:
        plain = self.retention._in_thread

        async def step(function: Callable[[], Any]) -> Any:
            self._count(killed_at)
            return await plain(function)

        self.retention._in_thread = step  # type: ignore[method-assign]
        with a_store(self.run) as self.store:
            store = self.store

            async def commit(changes: RowChanges) -> None:
                self._count(killed_at)
                store.commit(changes)
                self.commits.append(changes)
                self._count(killed_at)

            task = asyncio.ensure_future(self.retention.run(commit))  # noqa: TID251
            try:
                while not done() and not task.done():
                    await asyncio.wait([task], timeout=0.01)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                task.result()

    def _count(self, killed_at: int) -> None:
        self.steps += 1
        if self.steps == killed_at:
            raise Killed


def archived(run: Path) -> list[int]:
    with reading(run) as connection:
        return [group_id for (group_id,) in connection.execute("SELECT group_id FROM archived ORDER BY group_id")]


def content(run: Path) -> dict[int, Payload]:
    """All tokens of the run, by trajectory."""
    with a_store(run) as store:
        return {row.trajectory_id: store.payload(row.trajectory_id) for row in store.rows(TrajectoryRow, "")}


def same(one: dict[int, Payload], other: dict[int, Payload]) -> bool:
    def plain(payload: Payload) -> dict[str, Any]:
        return {**vars(payload), "token_ids": payload.token_ids.tobytes(), "logprobs": payload.logprobs.tobytes()}

    return {each: plain(payload) for each, payload in one.items()} == {
        each: plain(payload) for each, payload in other.items()
    }


def expected_groups(run: Path, batches: int) -> list[int]:
    with reading(run) as connection:
        query = f"SELECT group_id FROM groups WHERE status = 'dropped' OR batch < {batches} ORDER BY group_id"
        return [group_id for (group_id,) in connection.execute(query)]
