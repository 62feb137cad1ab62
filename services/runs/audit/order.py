"""Checks the order of batches and versions: no gap, nothing twice, and every training acknowledged."""

import json
import sqlite3
from dataclasses import dataclass, field
from typing import Final

from gspo_services.runs.audit.findings import Findings, Rules

MEMBERS: Final = "SELECT group_id, status, batch FROM groups WHERE group_id IN (SELECT value FROM json_each(?))"
CONTENT: Final = """
SELECT count(*), total(num_tokens), total(num_action_tokens) FROM trajectories
WHERE group_id IN (SELECT value FROM json_each(?))
"""
CLAIMED: Final = "SELECT batch, count(*) FROM groups WHERE status = 'batched' GROUP BY batch"


@dataclass(frozen=True, kw_only=True)
class Order:
    """The small tables with a row for each batch: they fit in memory."""

    batch_versions: dict[int, int]
    """The policy version for which each batch was assembled."""
    trained_batches: dict[int, int]
    """By published version, ascending: the number of batches that its weights were trained on."""
    trained: list[tuple[int, int]]
    """(batch, published version) of each training, by version. Version 0: a batch that was trained again on the way to the
    newest version, and made none."""
    checkpointed: int
    """Batches that a checkpoint covers."""
    quarantined: dict[int, int] = field(default_factory=dict)
    """By batch that was quarantined: the newest version then."""
    skipped: set[tuple[int, int]] = field(default_factory=set)
    """The (batch, published version) pairs of ``trained`` for which nothing was trained."""

    @property
    def versions(self) -> set[int]:
        return set(self.trained_batches)

    @property
    def newest_trained(self) -> int:
        """The number of batches that the newest weights were trained on."""
        return list(self.trained_batches.values())[-1] if self.trained_batches else 0


def read_order(connection: sqlite3.Connection) -> Order:
    """Read the tables. Raises: sqlite3.DatabaseError."""
    checkpointed = connection.execute("SELECT coalesce(max(next_batch), 0) FROM checkpointed").fetchone()[0]
    return Order(
        batch_versions=dict(connection.execute("SELECT batch, policy_version FROM batches ORDER BY batch")),
        trained_batches=dict(
            connection.execute("SELECT policy_version, trained_batches FROM versions ORDER BY policy_version")
        ),
        trained=list(connection.execute("SELECT batch, policy_version FROM trained ORDER BY policy_version, batch")),
        checkpointed=int(checkpointed),
        quarantined=dict(connection.execute("SELECT batch, policy_version FROM quarantined ORDER BY batch")),
        skipped=set(connection.execute("SELECT batch, policy_version FROM trained WHERE how = 'skipped'")),
    )


def audit_batches(connection: sqlite3.Connection, findings: Findings, rules: Rules, order: Order) -> None:
    """Check each batch: its number, its version, its groups. Raises: sqlite3.DatabaseError."""
    claimed = dict(connection.execute(CLAIMED))
    expected = last_version = 0
    for batch, version, group_ids, stats in connection.execute(
        "SELECT batch, policy_version, group_ids, stats FROM batches ORDER BY batch"
    ):
        where = f"batch {batch}"
        if batch != expected:
            findings.add("batch missing", f"batch {expected} is missing before batch {batch}")
        expected = batch + 1
        if version <= last_version:
            findings.add(
                "versions do not increase", f"{where} was assembled at version {version}, the one before at {last_version}"
            )
        last_version = version
        if order.trained_batches.get(version) != batch and not _was_under_way(order, batch, version):
            text = f"{where} was assembled at version {version}, "
            trained_on = order.trained_batches.get(version)
            text += "which was never published" if trained_on is None else f"which was trained on {trained_on} batches"
            findings.add("batch out of order", text)
        listed = json.loads(group_ids)
        if rules.groups_per_batch is not None and len(listed) != rules.groups_per_batch:
            findings.add("batch not whole", f"{where} has {len(listed)} groups, but should have {rules.groups_per_batch}")
        if batch not in order.quarantined:
            _audit_members(connection, findings, batch, group_ids, listed)
        if claimed.get(batch, 0) != (0 if batch in order.quarantined else len(listed)):
            text = f"{where} lists {len(listed)} groups, {claimed.get(batch, 0)} groups say that they are in it"
            findings.add("group and batch disagree", text)
        _audit_content(connection, findings, where, group_ids, stats)


def audit_quarantine(connection: sqlite3.Connection, findings: Findings, order: Order) -> None:
    """Check that batches that were quarantined are skipped from then on, and no others. Raises: sqlite3.DatabaseError."""
    for batch, reason in connection.execute("SELECT batch, reason FROM quarantined ORDER BY batch"):
        if batch not in order.batch_versions:
            findings.add("batch missing", f"batch {batch} was quarantined, and is not there")
        if not reason:
            findings.add("quarantined without a reason", f"batch {batch} was quarantined without a reason")
    for batch, version in order.trained:
        quarantined_at = order.quarantined.get(batch)
        if (batch, version) in order.skipped:
            if quarantined_at is None:
                findings.add(
                    "skipped without a reason", f"batch {batch} was skipped at version {version}, and not quarantined"
                )
        elif quarantined_at is not None and version > quarantined_at:
            text = f"batch {batch} was quarantined at version {quarantined_at}, and trained into version {version}"
            findings.add("trained although quarantined", text)


def _was_under_way(order: Order, batch: int, version: int) -> bool:
    """Return whether ``version`` may be missing: a learner may die after it asked for its batch, before it announces it."""
    return version not in order.versions and order.trained_batches.get(version - 1) == batch - 1


def _audit_members(
    connection: sqlite3.Connection, findings: Findings, batch: int, group_ids: str, listed: list[int]
) -> None:
    if len(set(listed)) != len(listed):
        findings.add("trained twice", f"batch {batch} lists a group twice: {sorted(listed)}")
    found = {group_id: (status, own) for group_id, status, own in connection.execute(MEMBERS, (group_ids,))}
    for group_id in listed:
        status, own = found.get(group_id, ("not there", None))
        if status == "batched" and own != batch:
            findings.add("trained twice", f"group {group_id} is in batches {own} and {batch}")
        elif status != "batched":
            findings.add("group and batch disagree", f"group {group_id} is in batch {batch}, but is {status}")


def _audit_content(connection: sqlite3.Connection, findings: Findings, where: str, group_ids: str, stats: str) -> None:
    recorded = json.loads(stats)
    names = ("num_trajectories", "num_tokens", "num_action_tokens")
    for name, found in zip(names, connection.execute(CONTENT, (group_ids,)).fetchone(), strict=True):
        if recorded.get(name) != found:
            text = f"{where} was assembled with {name} {recorded.get(name)!r:.100}, it has {found:.0f} now"
            findings.add("batch was changed", text)


def audit_versions(findings: Findings, order: Order) -> list[str]:
    """Check that versions are published and acknowledged in order. Returns notes on what is still under way."""
    before = -1
    steps: dict[int, int] = {}
    for version, trained_on in order.trained_batches.items():
        if trained_on > before + 1:
            text = f"version {version} was trained on {trained_on} batches, but the one before it on {max(before, 0)}"
            findings.add("version skips a batch", text)
        elif trained_on < before:
            text = f"version {version} was trained on {trained_on} batches, but the one before it on {before}"
            findings.add("version goes back", text)
        # A learner that trained the last batch again and came to other weights gives them the next number.
        steps[version] = before if trained_on != before else trained_on - 1
        before = trained_on
    assembled = max(order.batch_versions, default=-1) + 1
    for batch, version in order.trained:
        if batch not in order.batch_versions:
            findings.add("trained without a batch", f"batch {batch} was trained into version {version}, but does not exist")
        elif version == 0:
            if batch >= order.newest_trained - 1:
                findings.add(
                    "trained out of order", f"batch {batch} was trained and made no version, and no newer one exists"
                )
        elif order.trained_batches.get(version) != batch + 1:
            text = f"batch {batch} was trained into version {version}, which "
            trained_on_now = order.trained_batches.get(version)
            text += "was never published" if trained_on_now is None else f"was trained on {trained_on_now} batches"
            findings.add("trained out of order", text)
        elif steps[version] != batch:
            text = f"batch {batch} was trained into version {version} on weights of {max(steps[version], 0)} batches"
            findings.add("trained out of order", text)
    return _audit_acknowledged(findings, order, assembled)


def _audit_acknowledged(findings: Findings, order: Order, assembled: int) -> list[str]:
    notes = []
    acknowledged = {batch for batch, _ in order.trained}
    newest = order.newest_trained
    if newest > assembled:
        findings.add(
            "trained without a batch", f"the newest version was trained on {newest} batches, but {assembled} were assembled"
        )
    if order.checkpointed > assembled:
        findings.add(
            "trained without a batch", f"a checkpoint covers {order.checkpointed} batches, but {assembled} were assembled"
        )
    for batch in order.batch_versions:
        if batch in acknowledged:
            continue
        if batch < max(newest - 1, order.checkpointed):
            text = (
                f"batch {batch}: the newest version was trained on {newest} batches, {order.checkpointed} are checkpointed"
            )
            findings.add("training not acknowledged", text)
        else:
            notes.append(f"batch {batch} is assembled, but its training is not acknowledged yet")
    return notes
