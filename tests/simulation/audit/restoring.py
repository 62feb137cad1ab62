"""The simulated run goes on from an earlier state, a backup or what a damage left: what comes back is compared with what was
committed at that time.
"""

import copy
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from gspo_services.broker.rows import BatchRow, GroupRow, QuarantinedRow, TrainedRow, TrajectoryRow, VersionRow
from gspo_services.broker.store.acceptance import accept_loss
from gspo_services.broker.store.reader import LEDGER_FILE, Reader, StoreMismatch, reading
from gspo_services.runs.backup import BackupManifest, back_up, restore
from gspo_services.runs.backup.manifest import read_manifest
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import Settings
from tests.simulation.audit.audit import Audit
from tests.simulation.audit.books import Durable

RESTORED = ("metrics.jsonl", "settings.json", "checkpoints", "archive", f"{LEDGER_FILE}*", "ledger.mark*")
KEPT = ("alone", "contents", "parts", "delivered_to", "failed_at", "num_losses")
"""Books that go back with the run, besides ``durable``."""


class Snapshot:
    """The audit's books as they are when it is made."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self.durable = copy.deepcopy(audit.durable)
        self._published = dict(audit.published)
        self._kept: dict[str, Any] = {name: copy.deepcopy(getattr(audit, name)) for name in KEPT}

    def require_whole(self, found: Durable) -> None:
        """What was committed is there again."""
        former = self.durable
        whole = (found.chunks, found.journals, found.groups, found.versions) == (
            {each: chunks for each, chunks in former.chunks.items() if chunks},
            former.journals,
            former.groups,
            former.versions,
        )
        self._audit.require(whole, "restore: the whole run comes back", lambda: f"there is {found}, committed was {former}")

    def put_back(self, found: Durable) -> None:
        """The audit goes on from ``found``."""
        audit = self._audit
        audit.durable = found
        audit.logs.clear()
        audit.leased.clear()
        for name, book in self._kept.items():
            setattr(audit, name, book)
        audit.published = self._published
        audit.holder = None


class AcceptedLoss:
    """A person goes on from an old copy of the ledger, which was made when this is."""

    def __init__(self, settings: Settings, audit: Audit) -> None:
        self._directory: Path = settings.run.directory
        self._audit = audit
        self._books = Snapshot(audit)

    def accept(self) -> None:
        """The processes are dead; the broker has refused to start."""
        accepted = accept_loss(self._directory / LEDGER_FILE)
        assert accepted is not None, "the broker refused a ledger that lacks nothing"
        found = read_durable(self._directory)
        self._books.require_whole(found)
        self._books.put_back(found)
        self._audit.num_losses += 1
        self._audit.happened["loss accepted"] += 1


class Restoring:
    """Takes one backup, and puts it back."""

    def __init__(self, settings: Settings, audit: Audit) -> None:
        self._settings = settings
        self._directory: Path = settings.run.directory
        self._audit = audit
        self._backup: Path | None = None
        self._books = Snapshot(audit)

    def back_up(self) -> bool:
        """False: there is no state that can be copied just now."""
        write_run_settings(self._settings)
        try:
            self._backup, _ = back_up(self._directory, self._directory / "backups", lambda _: None)
        except (ServiceError, ValueError):
            return False  # no ledger yet, or a checkpoint that is just being replaced
        self._books = Snapshot(self._audit)
        return True

    def restore(self, *, earlier: bool) -> str:
        """Put the backup in the place of the run, whose processes are dead; ``earlier``: as of its first checkpoint.
        Returns what was done; empty when it cannot be."""
        assert self._backup is not None
        manifest: BackupManifest = read_manifest(self._backup)
        batch = manifest.positions[0] if earlier and manifest.positions else None
        target = self._directory / "restored"
        try:
            restore(self._backup, target, batch, lambda _: None)
        except StoreMismatch:
            return ""  # Batches were requeued, which is only restored whole.
        for pattern in RESTORED:
            for path in self._directory.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in target.iterdir():
            path.rename(self._directory / path.name)
        target.rmdir()
        self._compare(read_durable(self._directory), batch)
        return "restored whole" if batch is None else "restored to an earlier batch"

    def _compare(self, found: Durable, batch: int | None) -> None:
        """What stays is what was committed; the audit goes on from there."""
        audit, former = self._audit, self._books.durable
        last = len(former.batches) if batch is None else batch
        members = [group_id for index in range(last) for group_id in former.batches[index].group_ids]
        trained = [row.trajectory_id for row in former.trajectories.values() if row.group_id in members]
        audit.require(
            found.batches == {index: row for index, row in former.batches.items() if index < last}
            and all(found.groups.get(group_id) == former.groups[group_id] for group_id in members)
            and all(found.chunks.get(each) == former.chunks.get(each) for each in trained),
            "restore: what was trained comes back",
            lambda: f"restored are batches {sorted(found.batches)}, committed were {sorted(former.batches)} (to {last})",
        )
        if batch is None:
            self._books.require_whole(found)
        self._books.put_back(found)
        if batch is not None:
            newest = found.newest_version
            audit.contents = {index: content for index, content in audit.contents.items() if index < batch}
            audit.parts = {place: content for place, content in audit.parts.items() if place[0] < batch}
            audit.published = {version: content for version, content in audit.published.items() if version <= newest}
            for book in (audit.delivered_to, audit.failed_at):  # Later batches are made anew, of other groups.
                for index in [index for index in book if index >= batch]:
                    del book[index]


def read_durable(directory: Path) -> Durable:
    """What a ledger holds."""
    with reading(directory) as connection, closing(connection):
        reader = Reader(directory / LEDGER_FILE, connection)
        contents = reader.contents()
        trajectories = {row.trajectory_id: row for row in reader.rows(TrajectoryRow, "")}
        chunks = {each: found for each in trajectories if (found := reader.chunks(each))}
        journals = {each: journal for each in trajectories if (journal := reader.journal(each))}
        return Durable(
            groups={row.group_id: row for row in reader.rows(GroupRow, "")},
            trajectories=trajectories,
            chunks=chunks,
            journals=journals,
            batches={row.index: row for row in reader.rows(BatchRow, "ORDER BY batch")},
            versions={row.policy_version: row for row in reader.rows(VersionRow, "ORDER BY policy_version")},
            trained=reader.rows(TrainedRow, "ORDER BY policy_version, batch"),
            quarantined={row.index: row for row in reader.rows(QuarantinedRow, "")},
            next_batch_checkpointed=reader.number("SELECT max(next_batch) FROM checkpointed"),
            run=contents.run,
            tasks={row.task_index: row for row in contents.tasks},
            num_prompts=contents.next_prompt,
            num_passed_over=contents.run.num_passed_over,
        )
