"""Reads a run's ledger and checks from its rows alone that nothing was lost and nothing trained twice."""

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Audit:
    """What the rows say."""

    num_batches: int
    num_trained_trajectories: int
    num_resumed: int
    """Trajectories whose tokens came under more than one lease."""
    num_trained_again: int
    """Batches that were trained more than once (after a restart of the learner)."""
    dropped: dict[str, int]
    problems: list[str]


def audit(directory: Path) -> Audit:
    """Audit ``directory``/ledger.sqlite3."""
    with sqlite3.connect(f"file:{directory / 'ledger.sqlite3'}?mode=ro", uri=True) as store:
        problems = _batch_problems(store) + _chunk_problems(store)
        batches = store.execute("SELECT group_ids FROM batches").fetchall()
        trained = Counter(batch for (batch,) in store.execute("SELECT batch FROM trained"))
        resumed = store.execute(
            "SELECT COUNT(*) FROM (SELECT trajectory_id FROM chunks GROUP BY trajectory_id HAVING COUNT(DISTINCT epoch) > 1)"
        ).fetchone()[0]
        members = store.execute(
            "SELECT COUNT(*) FROM trajectories JOIN groups USING (group_id) WHERE groups.status = 'batched'"
        ).fetchone()[0]
        dropped = Counter(reason for (reason,) in store.execute("SELECT drop_reason FROM groups WHERE status = 'dropped'"))
        problems += [f"batch {index} was never trained" for index in range(len(batches)) if index not in trained]
    again = sum(1 for count in trained.values() if count > 1)
    return Audit(len(batches), members, resumed, again, dict(dropped), problems)


def _batch_problems(store: sqlite3.Connection) -> list[str]:
    problems = []
    seen: dict[int, int] = {}
    rows = store.execute("SELECT batch, group_ids FROM batches ORDER BY batch").fetchall()
    if [batch for batch, _ in rows] != list(range(len(rows))):
        problems.append(f"batches are not dense: {[batch for batch, _ in rows]}")
    for batch, group_ids in rows:
        for group in json.loads(group_ids):
            if group in seen:
                problems.append(f"group {group} is in batches {seen[group]} and {batch}")
            seen[group] = batch
    prompts = store.execute("SELECT prompt, group_id, status FROM groups WHERE split = 'train' ORDER BY prompt").fetchall()
    if [prompt for prompt, _, _ in prompts] != list(range(len(prompts))):
        problems.append("a prompt was skipped")
    for _, group, status in prompts:
        if (status == "batched") != (group in seen):
            problems.append(f"group {group} is {status}, but {'' if group in seen else 'not '}in a batch")
    return problems


def _chunk_problems(store: sqlite3.Connection) -> list[str]:
    problems = []
    covered: Counter[int] = Counter()
    rows = store.execute("SELECT trajectory_id, start, num_tokens FROM chunks ORDER BY trajectory_id, start")
    for trajectory, start, num_tokens in rows:
        if start != covered[trajectory]:
            problems.append(f"trajectory {trajectory}: a chunk starts at {start}, {covered[trajectory]} tokens are there")
        covered[trajectory] += num_tokens
    query = "SELECT trajectory_id, num_tokens, trajectories.status FROM trajectories JOIN groups USING (group_id)"
    for trajectory, num_tokens, status in store.execute(query + " WHERE groups.status = 'batched'"):
        if covered[trajectory] != num_tokens or status != "finished":
            problems.append(f"trajectory {trajectory}: {status}, {covered[trajectory]} of {num_tokens} tokens stored")
    return problems
