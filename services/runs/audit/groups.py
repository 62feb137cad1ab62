"""Checks every group and every prompt: complete, in order, and trained or dropped for a stated reason."""

import sqlite3
from typing import Any, Final, get_args

from gspo_services.broker.rows import DropReason
from gspo_services.runs.audit.findings import Findings, Outcome, Rules

GROUPS: Final = """
SELECT g.group_id, g.split, g.status, g.batch, g.drop_reason, count(t.trajectory_id), total(t.status = 'finished'),
       total(t.status = 'failed'), b.batch IS NOT NULL, a.reason
FROM groups g LEFT JOIN trajectories t ON t.group_id = g.group_id LEFT JOIN batches b ON b.batch = g.batch
LEFT JOIN quarantined a ON a.batch = g.batch
GROUP BY g.group_id
"""
OUTCOMES: Final = """
SELECT g.split, CASE WHEN g.status != 'batched' THEN g.status WHEN g.batch IN (SELECT batch FROM trained) THEN 'trained'
       ELSE 'in a batch' END AS outcome, coalesce(g.drop_reason, ''), count(DISTINCT g.group_id), count(t.trajectory_id),
       total(t.num_tokens), total(t.num_action_tokens), coalesce(json_extract(g.sampling, '$[6]'), '') AS adapter
FROM groups g LEFT JOIN trajectories t ON t.group_id = g.group_id GROUP BY g.split, outcome, g.drop_reason, adapter
"""
REASONS: Final = get_args(DropReason)
SHELVED: Final = ("quarantined", "requeued", "resampled")


def audit_groups(connection: sqlite3.Connection, findings: Findings, rules: Rules) -> None:
    """Check all groups, then all prompts. Raises: sqlite3.DatabaseError."""
    _audit_prompts(connection, findings)
    size = rules.group_size
    for row in connection.execute(GROUPS):
        group_id, split, status, batch, reason, members, finished, failed, batch_exists, why_quarantined = row
        where = f"group {group_id}"
        wanted = size if split == "train" else 1
        if wanted is not None and members != wanted:
            findings.add("group not whole", f"{where} has {members} trajectories, but should have {wanted}")
        if status in ("batched", "complete", "evaluated", "filtered", *SHELVED):
            done = finished + (failed if split == "eval" else 0)
            if done != members:
                findings.add(
                    "group not whole", f"{where} is {status}, but only {done:.0f} of its {members} trajectories are finished"
                )
        if status == "batched" and not batch_exists:
            findings.add("batch missing", f"{where} is in batch {batch}, which does not exist")
        if status in SHELVED and not why_quarantined:
            findings.add("quarantined without a reason", f"{where} is {status}, and batch {batch} has no reason for that")
        if status == "batched" and why_quarantined:
            findings.add("trained although quarantined", f"{where} is in batch {batch}, quarantined: {why_quarantined}")
        if status not in ("batched", *SHELVED) and batch is not None:
            findings.add("group and batch disagree", f"{where} is {status}, but in batch {batch}")
        if status == "dropped" and reason not in REASONS:
            findings.add(
                "dropped without a reason", f"{where} is dropped with the reason {reason!r}; known are {', '.join(REASONS)}"
            )


def _audit_prompts(connection: sqlite3.Connection, findings: Findings) -> None:
    """Check that each prompt is in exactly one group, in group order; other groups with it must have been replaced."""
    expected = 0
    before: tuple[int, str] = (-1, "")
    query = "SELECT prompt, group_id, status, replaces FROM groups WHERE split = 'train' ORDER BY prompt, group_id"
    for prompt, group_id, status, replaces in connection.execute(query):
        if prompt < expected and before != (replaces, "resampled"):
            findings.add("prompt used twice", f"prompt {prompt} is in group {group_id} and in one before it")
        elif prompt > expected:
            last = prompt - 1
            missing = f"prompt {expected} is" if last == expected else f"prompts {expected} to {last} are"
            findings.add("prompt skipped", f"{missing} in no group; the next is prompt {prompt} in group {group_id}")
        if before[1] == "resampled" and prompt >= expected:
            findings.add("prompt skipped", f"prompt {expected - 1} was requeued with group {before[0]}, and is in no other")
        expected = prompt + 1
        before = (group_id, status)
    if before[1] == "resampled":
        findings.add("prompt skipped", f"prompt {expected - 1} was requeued with group {before[0]}, and is in no other")


def outcomes(connection: sqlite3.Connection) -> list[Outcome]:
    """Count all groups by how they ended. Raises: sqlite3.DatabaseError."""
    return [_outcome(row) for row in connection.execute(OUTCOMES)]


def _outcome(row: tuple[Any, ...]) -> Outcome:
    split, status, reason, groups, trajectories, tokens, actions, adapter = row
    return Outcome(
        split=split,
        status=status,
        reason=reason,
        groups=groups,
        trajectories=trajectories,
        tokens=int(tokens),
        action_tokens=int(actions),
        adapter=adapter,
    )
