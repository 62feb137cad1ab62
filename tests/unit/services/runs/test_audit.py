"""Every corruption that is planted in a small real ledger is named; the ledger itself is clean."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.broker.store.reader import LEDGER_FILE, NoLedger
from gspo_services.runs.audit import audit_run
from gspo_services.runs.audit.findings import KEPT
from gspo_services.runs.metrics.follower import MOST_LINE_BYTES
from tests.support.processes.small_run import write_checkpoint, write_small_run
from tests.support.runs.spoiled import spoil


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("audit") / "run"
    write_small_run(directory)
    return directory


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def test_the_run_is_clean_and_every_trajectory_is_accounted_for(small_run: Path) -> None:
    audit = audit_run(small_run)
    assert audit.problems == []
    assert audit.clean
    assert audit.notes == []
    # Eleven groups: six in batches, one failed (after five tokens), two made stale by the restart, two left over.
    assert (audit.num_batches, audit.num_trained_batches, audit.num_trained_again) == (3, 3, 1)
    assert audit.num_trained_trajectories == 12
    assert audit.dropped == {"failed": 1, "stale": 2}
    assert audit.num_resumed == 1
    counts = {(row.status, row.reason): (row.groups, row.trajectories, row.tokens) for row in audit.outcomes}
    assert counts[("dropped", "failed")] == (1, 2, 5)
    assert counts[("trained", "")][:2] == (6, 12)
    assert counts[("complete", "")][:2] == (2, 4)
    assert audit.num_versions == 5
    assert audit.run_id == "run"


# The change to the ledger, the name of the violation, and words of its text.
PLANTED: list[tuple[str, str, str]] = [
    ("DELETE FROM chunks WHERE trajectory_id = 2 AND start = 0", "gap between chunks", "the chunk at 2 follows 0 tokens"),
    ("UPDATE chunks SET start = 1 WHERE trajectory_id = 2 AND start = 2", "chunks overlap", "the chunk at 1 follows 2"),
    (
        "DELETE FROM chunks WHERE trajectory_id = 2 AND start = 2",
        "row and chunks differ",
        "tokens 5 in its row, 2 in its chunks",
    ),
    (
        "UPDATE chunks SET token_ids = flip(token_ids) WHERE trajectory_id = 3",
        "chunk was changed",
        "trajectory 3: the chunk at 0",
    ),
    ("UPDATE chunks SET header = x'00' WHERE trajectory_id = 3", "chunk was changed", "a header that cannot be read"),
    ("UPDATE chunks SET logprobs = x'00' WHERE trajectory_id = 3", "chunk of another length", "1 bytes of log-probs"),
    (
        "UPDATE chunks SET num_tokens = 2 WHERE trajectory_id = 3",
        "runs do not cover a chunk",
        "has 2 tokens, but its segments",
    ),
    (
        "UPDATE chunks SET epoch = 9 WHERE trajectory_id = 2 AND start = 0",
        "epoch went back",
        "has epoch 2, but the one before has 9",
    ),
    ("UPDATE chunks SET epoch = 9 WHERE trajectory_id = 3", "epoch went back", "a chunk of epoch 9, but its own is 1"),
    ("DELETE FROM trajectories WHERE trajectory_id = 3", "chunk of no trajectory", "belongs to trajectory 3"),
    ("DELETE FROM trajectories WHERE trajectory_id = 3", "group not whole", "group 1 has 1 trajectories, but should have 2"),
    ("DELETE FROM trajectories WHERE trajectory_id > 4", "chunk of no trajectory", "belongs to trajectory 13"),
    (
        "UPDATE chunks SET header = short_segments() WHERE trajectory_id = 3",
        "runs do not cover a chunk",
        "but its segments 1 and",
    ),
    ("UPDATE chunks SET header = unversioned() WHERE trajectory_id = 3", "action token without a version", "versions for 2"),
    (
        "UPDATE trajectories SET status = 'free' WHERE trajectory_id = 3",
        "group not whole",
        "1 is batched, but only 1 of its 2",
    ),
    ("DELETE FROM batches WHERE batch = 1", "batch missing", "is in batch 1, which does not exist"),
    ("UPDATE batches SET policy_version = 2 WHERE batch = 2", "versions do not increase", "2, the one before at 2"),
    ("DELETE FROM trained WHERE batch = 1", "training not acknowledged", "batch 1: the newest version was trained on 3"),
    (
        "UPDATE versions SET trained_batches = 4 WHERE policy_version = 5",
        "trained without a batch",
        "on 4 batches, but 3 were",
    ),
    ("DELETE FROM versions WHERE policy_version = 2", "checkpoint of another run", "a version that was never published"),
    ("UPDATE trajectories SET group_id = 99 WHERE trajectory_id = 3", "trajectory of no group", "3 belongs to group 99"),
    ("UPDATE trajectories SET status = 'free' WHERE trajectory_id = 3", "unfinished trajectory in a batch", "3 is free"),
    ("UPDATE trajectories SET finish_reason = NULL WHERE trajectory_id = 3", "trajectory without an end", "reason is None"),
    ("UPDATE trajectories SET version_sum = 7 WHERE trajectory_id = 3", "row and chunks differ", "version sum 7 in its row"),
    (
        "UPDATE trajectories SET sequences = '[[1, -1], [1, 0]]' WHERE trajectory_id = 3",
        "row and chunks differ",
        "sequences [[1, -1], [1, 0]] in its row, [] in its chunks",
    ),
    ("DELETE FROM journal WHERE place = 1", "row and journal differ", "2 entries of 42 bytes in its row, 1 of 21 there"),
    ("UPDATE trajectories SET num_action_tokens = 1 WHERE trajectory_id = 3", "batch was changed", "num_action_tokens"),
    ("UPDATE groups SET prompt = 70 WHERE prompt = 6", "prompt skipped", "prompt 6 is in no group; the next is prompt 7"),
    ("UPDATE groups SET prompt = 3 WHERE prompt = 4", "prompt used twice", "prompt 3 is in group 4"),
    ("UPDATE groups SET drop_reason = NULL WHERE group_id = 0", "dropped without a reason", "the reason None"),
    ("UPDATE groups SET drop_reason = 'lost' WHERE group_id = 0", "dropped without a reason", "the reason 'lost'"),
    (
        "UPDATE groups SET batch = 0 WHERE group_id = 0",
        "group and batch disagree",
        "group 0 is dropped, but in batch 0",
    ),
    (
        "UPDATE groups SET status = 'complete' WHERE group_id = 1",
        "group and batch disagree",
        "is in batch 0, but is complete",
    ),
    ("UPDATE groups SET batch = 1 WHERE group_id = 1", "trained twice", "group 1 is in batches 1 and 0"),
    ("UPDATE groups SET status = 'batched', batch = 2 WHERE group_id = 0", "group and batch disagree", "3 groups say"),
    ("UPDATE batches SET group_ids = '[1, 2]' WHERE batch = 1", "trained twice", "group 1 is in batches 0 and 1"),
    ("UPDATE batches SET group_ids = '[1, 1]' WHERE batch = 0", "trained twice", "batch 0 lists a group twice"),
    ("UPDATE batches SET group_ids = '[1]' WHERE batch = 0", "batch not whole", "has 1 groups, but should have 2"),
    ("DELETE FROM batches WHERE batch = 1", "batch missing", "batch 1 is missing before batch 2"),
    ("DELETE FROM batches WHERE batch = 1", "trained without a batch", "batch 1 was trained into version 3"),
    ("UPDATE batches SET policy_version = 1 WHERE batch = 2", "versions do not increase", "the one before at 2"),
    (
        "UPDATE batches SET policy_version = 5 WHERE batch = 2",
        "batch out of order",
        "version 5, which was trained on 3 batches",
    ),
    ("UPDATE batches SET policy_version = 3 WHERE batch = 0", "token too old", "2 versions, 1 allowed"),
    (
        "UPDATE batches SET policy_version = 0 WHERE batch = 0",
        "token newer than its batch",
        "its batch 0 was assembled at 0",
    ),
    (
        "DELETE FROM versions WHERE policy_version = 1",
        "token of a version that was never published",
        "3 tokens of version 1",
    ),
    (
        "UPDATE versions SET trained_batches = 4 WHERE policy_version = 5",
        "version skips a batch",
        "5 was trained on 4 batches",
    ),
    ("DELETE FROM trained WHERE batch = 0", "training not acknowledged", "batch 0: the newest version was trained on 3"),
    ("UPDATE trained SET policy_version = 2 WHERE policy_version = 3", "trained out of order", "was trained on 1 batches"),
    (
        "UPDATE trained SET policy_version = 9 WHERE policy_version = 3",
        "trained out of order",
        "9, which was never published",
    ),
    (
        "UPDATE versions SET trained_batches = 1 WHERE policy_version = 4",
        "version goes back",
        "version 4 was trained on 1 batches, but the one before it on 2",
    ),
    ("DELETE FROM versions WHERE policy_version = 2", "trained out of order", "into version 3 on weights of 0 batches"),
    ("INSERT INTO trained VALUES (2, 0, 'trained', 0)", "trained out of order", "batch 2 was trained and made no version"),
    (
        "UPDATE checkpointed SET next_batch = 7",
        "trained without a batch",
        "a checkpoint covers 7 batches, but 3 were assembled",
    ),
    ("UPDATE checkpointed SET next_batch = 2", "checkpoint missing", "the newest one there covers 1"),
    ("DELETE FROM metrics_lines WHERE line LIKE '%dropped%'", "no metrics line", "the drop of group 0"),
    ("UPDATE metrics_lines SET line = '{}' WHERE line LIKE '%\"batch\": 2%'", "no metrics line", "batch 2 into version 5"),
    (
        "UPDATE metrics_lines SET line = '{\"event\": 1}' WHERE number = 1",
        "metrics.jsonl differs",
        "metrics.jsonl: line 1 is",
    ),
]


@pytest.mark.parametrize(("statement", "name", "words"), PLANTED, ids=[statement for statement, _, _ in PLANTED])
def test_a_planted_corruption_is_named(run: Path, statement: str, name: str, words: str) -> None:
    spoil(run, statement)
    audit = audit_run(run)
    assert name in audit.findings.texts, audit.problems
    assert any(words in text for text in audit.findings.texts[name]), audit.findings.texts[name]
    assert not audit.clean


def a_damaged_page(run: Path) -> None:
    path = run / LEDGER_FILE
    data = bytearray(path.read_bytes())
    # The second half of the file with its page headers: the indices and rows there are gone.
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    path.write_bytes(data)


def an_index_that_lies(run: Path) -> None:
    spoil(run, "PRAGMA writable_schema = 1", "DELETE FROM sqlite_master WHERE name = 'trajectories_by_group'")


def a_checkpoint_of_more_batches(run: Path) -> None:
    write_checkpoint(run, 5, 8)


def a_checkpoint_of_other_batches(run: Path) -> None:
    write_checkpoint(run, 5, 1)


def a_checkpoint_that_nobody_acknowledged(run: Path) -> None:
    write_checkpoint(run, 5, 3)
    spoil(run, "UPDATE checkpointed SET next_batch = 3", "DELETE FROM trained WHERE batch = 2")


def a_changed_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:1], lines[2], *lines[2:]]) + "\n")


def an_endless_line(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"y" * (MOST_LINE_BYTES + 1), b"\n", *lines[2:]]))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (a_damaged_page, "database damaged"),
        (an_index_that_lies, "database damaged"),
        (a_checkpoint_of_more_batches, "checkpoint of another run"),
        (a_checkpoint_of_other_batches, "checkpoint of another run"),
        (a_checkpoint_that_nobody_acknowledged, "training not acknowledged"),
        (a_changed_line, "metrics.jsonl differs"),
        (an_endless_line, "metrics.jsonl differs"),
    ],
)
def test_damage_to_the_files_is_named(run: Path, damage: Callable[[Path], None], name: str) -> None:
    damage(run)
    assert name in audit_run(run).findings.counts


def test_damaged_lines_of_metrics_differ_alone(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[0], lines[1][:9], *lines[2:]]) + "\n")
    assert audit_run(run).findings.texts == {
        "metrics.jsonl differs": [
            "metrics.jsonl: line 2 is missing, or is not the ledger's",
            f"{path}: 2 damaged lines are left out; the first is line 2: its number is 1, and the line before it has 1",
        ]
    }


def test_only_the_damage_is_named(run: Path) -> None:
    spoil(run, "DELETE FROM trajectories WHERE trajectory_id = 3")
    assert audit_run(run).findings.counts == {"chunk of no trajectory": 1, "group not whole": 1, "batch was changed": 3}


def test_all_violations_are_counted_and_the_first_are_kept_in_words(run: Path) -> None:
    spoil(run, "UPDATE chunks SET checksum = 0")
    audit = audit_run(run)
    assert audit.findings.counts["chunk was changed"] == audit.num_chunks > 12
    spoil(run, *(f"INSERT INTO trained VALUES ({number}, {number}, 'trained', 0)" for number in range(100, 100 + KEPT + 5)))
    audit = audit_run(run)
    assert audit.findings.counts["trained without a batch"] == KEPT + 5
    assert len(audit.findings.texts["trained without a batch"]) == KEPT


def test_a_training_that_is_not_acknowledged_yet_is_a_note_and_no_violation(tmp_path: Path) -> None:
    """The learner has published the last version, and its report of the training has not arrived yet."""
    run = tmp_path / "run"
    write_small_run(run, reports_last=False)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:1]) + '\n{"line": 2, "ev')
    audit = audit_run(run)
    assert audit.problems == []
    assert audit.notes == [
        "batch 2 is assembled, but its training is not acknowledged yet",
        "metrics.jsonl is 5 lines behind the ledger: the broker brings it up to date when it runs",
    ]
    assert {row.status: row.groups for row in audit.outcomes if row.reason != "failed"} == {
        "trained": 4,
        "in a batch": 2,
        "complete": 2,
        "dropped": 2,
    }


def test_without_settings_the_sizes_are_not_checked_and_a_note_tells_it(run: Path) -> None:
    (run / "settings.json").unlink()
    spoil(run, "UPDATE batches SET policy_version = 3 WHERE batch = 0")
    audit = audit_run(run)
    assert "token too old" not in audit.findings.counts
    assert audit.notes[0].startswith("the sizes of groups and batches and the lag are not checked: ")


def test_the_result_is_plain_data(run: Path) -> None:
    spoil(run, "DELETE FROM trained WHERE batch = 0")
    plain = json.loads(json.dumps(audit_run(run).as_plain()))
    assert plain["clean"] is False
    assert plain["violations"]["training not acknowledged"]["count"] == 1
    assert plain["batches_trained"] == 2


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoLedger, match="is no run directory"):
        audit_run(tmp_path)
