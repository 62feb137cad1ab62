"""Checks that the ledgers of several brokers are one run: each has its share, and all saw the same training."""

import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from gspo_services.runs.audit import Findings, Rules
from gspo_services.runs.ledgers import broker_name

FOREIGN: Final = {
    "group": "SELECT group_id FROM groups WHERE group_id % ? != ? ORDER BY group_id",
    "trajectory": "SELECT trajectory_id FROM trajectories WHERE trajectory_id % ? != ? ORDER BY trajectory_id",
    "prompt": "SELECT prompt FROM groups WHERE split = 'train' AND prompt % ? != ? ORDER BY prompt",
    "task": "SELECT task_index FROM groups WHERE split = 'train' AND task_index % ? != ? ORDER BY task_index",
}
"""What a ledger must not hold: rows whose remainder is another broker's. Without any, no id is in two ledgers."""


@dataclass(frozen=True, kw_only=True)
class SharedHistory:
    """The part of a ledger's history that must agree with the other ledgers."""

    fingerprint: str
    batches: frozenset[int]
    versions: dict[int, tuple[int, str]]
    """By version: how many batches its weights were trained on, and their digest."""
    trained: frozenset[tuple[int, int]]
    """Batch and version."""
    checkpointed: int
    additions: dict[int, tuple[str, int, int, str]]
    """Added tasks, by number: source, index of the first task, number of tasks, and the file's digest."""

    @property
    def newest_version(self) -> int:
        return max(self.versions, default=0)


def read_share(connection: sqlite3.Connection) -> SharedHistory:
    """Read it in the snapshot of ``connection``. Raises: sqlite3.DatabaseError."""
    versions = connection.execute("SELECT policy_version, trained_batches, digest FROM versions")
    (fingerprint,) = connection.execute("SELECT max(value) FROM meta WHERE key = 'fingerprint'").fetchone()
    (checkpointed,) = connection.execute("SELECT coalesce(max(next_batch), 0) FROM checkpointed").fetchone()
    additions = connection.execute("SELECT number, source, first_task, num_tasks, digest FROM additions")
    return SharedHistory(
        fingerprint=str(fingerprint),
        batches=frozenset(batch for (batch,) in connection.execute("SELECT batch FROM batches")),
        versions={version: (trained_on, digest) for version, trained_on, digest in versions},
        trained=frozenset(connection.execute("SELECT batch, policy_version FROM trained")),
        checkpointed=int(checkpointed),
        additions={number: (source, first, num, digest) for number, source, first, num, digest in additions},
    )


def audit_ids(connection: sqlite3.Connection, findings: Findings, rules: Rules) -> None:
    """Check that everything in a ledger belongs to its broker. Raises: sqlite3.DatabaseError."""
    if rules.num_brokers == 1:
        return
    for what, query in FOREIGN.items():
        for (number,) in connection.execute(query, (rules.num_brokers, rules.broker)):
            owner = broker_name(number % rules.num_brokers)
            findings.add("share of another broker", f"{what} {number} belongs to {owner}")


def audit_across(findings: Findings, shares: Sequence[SharedHistory]) -> list[str]:
    """Compare the brokers' ledgers, by broker number. Returns notes on what is still under way.

    The snapshots of a live run are not of one moment. What one broker may hear later than another is therefore compared
    only up to the point that the last of them has reached.
    """
    for number, share in enumerate(shares):
        if share.fingerprint != shares[0].fingerprint:
            findings.add("brokers of different runs", f"{broker_name(number)} has other settings than broker 0")
    _audit_versions(findings, shares)
    _audit_trained(findings, shares)
    return [*_audit_additions(findings, shares), *_audit_batches(findings, shares)]


def _audit_additions(findings: Findings, shares: Sequence[SharedHistory]) -> list[str]:
    """Check that an index means the same task to all. A file is given to one broker after another."""
    notes = []
    for number in sorted(frozenset().union(*(share.additions for share in shares))):
        known = {place: share.additions[number] for place, share in enumerate(shares) if number in share.additions}
        if len(set(known.values())) > 1:
            said = ", ".join(
                f"{broker_name(place)}: {num} tasks from {first} of {source or 'the training set'} (digest {digest:.16})"
                for place, (source, first, num, digest) in known.items()
            )
            findings.add("added tasks differ", f"addition {number} is not the same everywhere: {said}")
        if len(known) < len(shares):
            notes.append(
                f"added tasks {number} are unknown to {_others(shares, known)}: `gspo data add` with the same file gives "
                "them to the rest"
            )
    return notes


def _audit_versions(findings: Findings, shares: Sequence[SharedHistory]) -> None:
    reached = min(share.newest_version for share in shares)
    replaced = _replaced(shares)
    for version in sorted(frozenset().union(*(share.versions for share in shares))):
        known = {number: share.versions[version] for number, share in enumerate(shares) if version in share.versions}
        if len(set(known.values())) > 1:
            said = ", ".join(
                f"{broker_name(number)}: {digest:.16} after {trained_on} batches"
                for number, (trained_on, digest) in known.items()
            )
            findings.add("versions differ", f"version {version} is not the same everywhere: {said}")
        if version <= reached and version not in replaced:
            trained_on = max(num for num, _ in known.values())
            passed = [number for number, share in enumerate(shares) if _has_passed(share, version, trained_on)]
            if len({*known, *passed}) < len(shares):
                findings.add("versions differ", f"version {version} is unknown to {_others(shares, {*known, *passed})}")


def _replaced(shares: Sequence[SharedHistory]) -> frozenset[int]:
    """Return the versions that a learner replaced after it returned to an earlier checkpoint. A broker that was away
    meanwhile never hears of them, nor of what was trained into them."""
    trained_on = {version: num for share in shares for version, (num, _) in share.versions.items()}
    replaced, least = set(), max(trained_on.values(), default=0) + 1
    for version in sorted(trained_on, reverse=True):
        if trained_on[version] >= least:
            replaced.add(version)
        least = min(least, trained_on[version])
    return frozenset(replaced)


def _has_passed(share: SharedHistory, version: int, trained_on: int) -> bool:
    """Return whether a broker already had a version of more batches when the learner came back and made ``version``, of
    ``trained_on`` batches: it hears of no version until there is one of as many batches."""
    return any(other < version and num > trained_on for other, (num, _) in share.versions.items())


def _audit_trained(findings: Findings, shares: Sequence[SharedHistory]) -> None:
    """Check trainings. Some shares of a batch may be skipped and the others trained: each ledger gives its own reason."""
    reached = min(share.newest_version for share in shares)
    covered = min(share.checkpointed for share in shares)
    made = {version: num - 1 for share in shares for version, (num, _) in share.versions.items()}
    replaced = _replaced(shares)
    for batch, version in sorted(frozenset.union(*(share.trained for share in shares))):
        if made.get(version) == batch and version not in replaced and (batch < covered or version < reached):
            # A version is announced before its training is reported.
            known = [
                number
                for number, share in enumerate(shares)
                if (batch, version) in share.trained or _has_passed(share, version, batch + 1)
            ]
        elif batch < covered:
            # Some may not have heard of a repeated training, or one into no version; but all heard of one training.
            known = [number for number, share in enumerate(shares) if any(batch == each for each, _ in share.trained)]
        else:
            continue
        if len(known) < len(shares):
            text = f"batch {batch} was trained into version {version}, but {_others(shares, known)} does not say so"
            findings.add("trainings differ", text)


def _audit_batches(findings: Findings, shares: Sequence[SharedHistory]) -> list[str]:
    notes = []
    newest = max((batch for share in shares for batch in share.batches), default=-1)
    for batch in range(newest + 1):
        missing = [number for number, share in enumerate(shares) if batch not in share.batches]
        if not missing:
            continue
        names = ", ".join(map(broker_name, missing))
        if batch < newest:
            findings.add("share missing", f"batch {batch} has no share from {names}, although a later batch exists")
        elif any(trained == batch for share in shares for trained, _ in share.trained):
            findings.add("share missing", f"batch {batch} was trained, but has no share from {names}")
        else:
            notes.append(f"batch {batch} is under way: it has no share from {names} yet")
    return notes


def _others(shares: Sequence[SharedHistory], known: Collection[int]) -> str:
    return ", ".join(broker_name(number) for number in range(len(shares)) if number not in known)
