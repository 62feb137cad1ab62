"""Checks the groups that dynamic sampling filtered out: they had zero advantage, and each is recorded and counted."""

import json
import sqlite3
from typing import Final

from gspo_services.runs.audit.findings import Findings

LEFT_OUT: Final = """
SELECT g.group_id, g.split, g.batch, json_group_array(json(t.turn_rewards))
FROM groups g LEFT JOIN trajectories t ON t.group_id = g.group_id WHERE g.status = 'filtered' GROUP BY g.group_id
"""
UNRECORDED: Final = """
SELECT group_id FROM groups WHERE status = 'filtered' EXCEPT
SELECT json_extract(line, '$.group_id') FROM metrics_lines WHERE json_extract(line, '$.event') = 'filtered'
"""
COUNTED: Final = """
SELECT (SELECT total(coalesce(json_extract(stats, '$.num_filtered_groups'), 0)) FROM batches)
     + (SELECT total(coalesce(json_extract(value, '$.filtered_groups'), 0)) FROM meta WHERE key = 'run'),
       (SELECT count(*) FROM metrics_lines WHERE json_extract(line, '$.event') = 'filtered')
"""
"""By the batches and by the lines of metrics: a run that was restored to an earlier batch has more lines than groups."""


def audit_filtered(connection: sqlite3.Connection, findings: Findings) -> None:
    """Check each group that was filtered out, and their number. Raises: sqlite3.DatabaseError."""
    for group_id, split, batch, turn_rewards in connection.execute(LEFT_OUT):
        where = f"group {group_id}"
        if split != "train" or batch is not None:
            findings.add("filtered out without a reason", f"{where} is filtered out, of split {split} and of batch {batch}")
        rewards = sorted({sum(rewards) for rewards in json.loads(turn_rewards)})
        if len(rewards) > 1:
            text = f"{where} is filtered out, and has an advantage: its rewards go from {rewards[0]:g} to {rewards[-1]:g}"
            findings.add("filtered out without a reason", text)
    for (group_id,) in connection.execute(UNRECORDED):
        findings.add("no metrics line", f"group {group_id} was filtered out")
    counted, recorded = connection.execute(COUNTED).fetchone()
    if counted != recorded:
        text = f"the batches counted {counted:.0f} groups that were filtered out while they filled, {recorded} are recorded"
        findings.add("no metrics line", text)
