"""Checks that every value in the ledger has a type that a broker writes: SQLite takes any value in any column."""

import sqlite3
from typing import Final

from gspo_services.runs.audit.findings import Findings

NUMBER: Final = "typeof({}) = 'integer'"
NUMBER_OR_NOTHING: Final = "typeof({}) IN ('integer', 'null')"
REAL_OR_NOTHING: Final = "typeof({}) IN ('real', 'integer', 'null')"
TEXT: Final = "typeof({}) = 'text'"
TEXT_OR_NOTHING: Final = "typeof({}) IN ('text', 'null')"
BYTES: Final = "typeof({}) = 'blob'"
OF_TYPE: Final = "typeof({0}) = 'text' AND CASE WHEN json_valid({0}) THEN json_type({0}) END = "
OBJECT: Final = f"{OF_TYPE}'object'"
LIST_WITHOUT: Final = (
    f"{OF_TYPE}'array' AND NOT EXISTS "
    "(SELECT 1 FROM json_each(CASE WHEN json_valid({0}) THEN {0} ELSE '[]' END) WHERE type "
)
WHOLE_NUMBERS: Final = f"{LIST_WITHOUT}!= 'integer')"
PAIRS: Final = f"{LIST_WITHOUT}!= 'array')"
ANY_NUMBERS: Final = f"{LIST_WITHOUT}NOT IN ('integer', 'real'))"

KINDS: Final[dict[str, dict[str, str]]] = {
    "groups": {
        **dict.fromkeys(("group_id", "prompt", "task_index"), NUMBER),
        **dict.fromkeys(("split", "status"), TEXT),
        **dict.fromkeys(("evaluation", "batch", "replaces"), NUMBER_OR_NOTHING),
        "drop_reason": TEXT_OR_NOTHING,
    },
    "trajectories": {
        **dict.fromkeys(("trajectory_id", "group_id", "epoch", "lease_version", "lease_start", "attempts"), NUMBER),
        **dict.fromkeys(("num_tokens", "num_action_tokens", "version_sum", "min_version", "num_turns"), NUMBER),
        **dict.fromkeys(("num_segments", "num_runs", "last_version", "last_sequence"), NUMBER),
        **dict.fromkeys(("num_entries", "journal_bytes"), NUMBER),
        "reward_size": REAL_OR_NOTHING,
        **dict.fromkeys(("status", "holder_peer", "holder_session"), TEXT),
        "finish_reason": TEXT_OR_NOTHING,
        **dict.fromkeys(("lost_by", "sequences"), PAIRS),
        "turn_rewards": ANY_NUMBERS,
        "discarded_turns": WHOLE_NUMBERS,
        "turn_roles": WHOLE_NUMBERS,
        "components": OBJECT,
    },
    "chunks": {
        **dict.fromkeys(("trajectory_id", "start", "epoch", "num_tokens", "checksum"), NUMBER),
        **dict.fromkeys(("header", "token_ids", "logprobs"), BYTES),
    },
    "journal": {**dict.fromkeys(("trajectory_id", "place"), NUMBER), "entry": BYTES},
    "batches": {**dict.fromkeys(("batch", "policy_version"), NUMBER), "group_ids": WHOLE_NUMBERS, "stats": OBJECT},
    "versions": {
        **dict.fromkeys(("policy_version", "num_bytes", "trained_batches", "vocabulary"), NUMBER),
        **dict.fromkeys(("endpoint", "digest"), TEXT),
    },
    "trained": {**dict.fromkeys(("batch", "policy_version"), NUMBER), "how": TEXT},
    "failures": {**dict.fromkeys(("batch", "reported", "silent"), NUMBER), **dict.fromkeys(("session", "reason"), TEXT)},
    "quarantined": {**dict.fromkeys(("batch", "policy_version"), NUMBER), "reason": TEXT},
    "evaluations": {
        **dict.fromkeys(("evaluation_id", "policy_version", "batch", "num_tasks", "num_finished", "num_failed"), NUMBER),
        "samples": NUMBER,
        **dict.fromkeys(("status", "name"), TEXT),
        **dict.fromkeys(("reward", "score"), REAL_OR_NOTHING),
    },
    "tasks": dict.fromkeys(("task_index", "num_zero_advantage", "rests_until"), NUMBER),
    "levels": {**dict.fromkeys(("ladder", "level", "num_groups"), NUMBER), "solved": REAL_OR_NOTHING},
    "additions": {
        **dict.fromkeys(("number", "first_task", "num_tasks", "at_draw"), NUMBER),
        **dict.fromkeys(("source", "name", "digest"), TEXT),
    },
    "archives": {
        **dict.fromkeys(("archive", "num_bytes", "num_groups", "num_trajectories", "num_tokens"), NUMBER),
        **dict.fromkeys(("name", "sha256"), TEXT),
        **dict.fromkeys(("first_batch", "last_batch"), NUMBER_OR_NOTHING),
    },
    "archived": dict.fromkeys(("group_id", "archive", "place"), NUMBER),
    "checkpointed": dict.fromkeys(("id", "next_batch"), NUMBER),
    "metrics_lines": {"number": NUMBER, "line": OBJECT},
    "meta": dict.fromkeys(("key", "value"), TEXT),
    "commits": {**dict.fromkeys(("slot", "number", "chunks", "tokens", "batches", "lines"), NUMBER), "digest": TEXT},
    "losses": {"loss": NUMBER, "line": OBJECT},
}


def audit_values(connection: sqlite3.Connection, findings: Findings) -> bool:
    """Return whether the rest of the ledger can be interpreted. Raises: sqlite3.DatabaseError."""
    before = findings.counts["value of another kind"]
    for table, kinds in KINDS.items():
        # One pass for each table: checking a good one costs no more than reading it.
        good = " AND ".join(f"({kind.format(column)})" for column, kind in kinds.items())
        (wrong,) = connection.execute(f"SELECT count(*) FROM {table} WHERE NOT coalesce({good}, FALSE)").fetchone()
        if wrong:
            findings.add("value of another kind", f"{wrong} rows of {table} hold values that no broker writes")
    return findings.counts["value of another kind"] == before
