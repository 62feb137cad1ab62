"""Checks the tasks that were added during a run: each file is unchanged, and no prompt used a task before it was added."""

import sqlite3
from pathlib import Path
from typing import Final

from gspo_services.broker.rows import ADDED_DIRECTORY
from gspo_services.runs.audit.findings import Findings
from gspo_services.shared.runtime.foreign import ForeignError, ForeignTree

ADDITIONS: Final = "SELECT number, name, digest, first_task, num_tasks FROM additions ORDER BY number"
BEYOND: Final = "SELECT group_id, task_index FROM groups WHERE split = 'train' AND task_index >= ?"
UNRECORDED: Final = """
SELECT number FROM additions EXCEPT
SELECT json_extract(line, '$.number') FROM metrics_lines WHERE json_extract(line, '$.event') = 'data_added'
"""


def audit_additions(connection: sqlite3.Connection, findings: Findings, directory: Path) -> None:
    """Check each addition and its file. Raises: sqlite3.DatabaseError."""
    expected, end = 1, None
    for number, name, digest, first_task, num_tasks in connection.execute(ADDITIONS):
        where = f"addition {number} ({name})"
        if number != expected or (end is not None and first_task != end):
            findings.add("added tasks missing", f"{where} begins at task {first_task}; addition {expected} at {end} is next")
        expected, end = number + 1, first_task + num_tasks
        path = directory / ADDED_DIRECTORY / name
        try:
            if ForeignTree(directory / ADDED_DIRECTORY).sha256(name) != digest:
                findings.add("added tasks missing", f"{where}: {path} was changed since")
        except (OSError, ForeignError) as error:
            findings.add("added tasks missing", f"{where}: {error}")
    for group_id, task_index in connection.execute(BEYOND, (end,)) if end is not None else ():
        findings.add("task of no file", f"group {group_id} has task {task_index}, but there are only {end}")
    for (number,) in connection.execute(UNRECORDED):
        findings.add("no metrics line", f"addition {number} of tasks")
