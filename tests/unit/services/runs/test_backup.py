"""A run that is copied while it goes on comes back whole, as it was or as it stood earlier, and trains on."""

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gspo_protocol.messages import Checkpointed, Resume
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.rows import GroupRow, TrajectoryRow
from gspo_services.broker.store.reader import LEDGER_FILE, Reader, StoreMismatch, reading
from gspo_services.broker.store.store import RowChanges
from gspo_services.cli.main import main
from gspo_services.learner.teacher.record import ScoreRecord
from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.manifest import FORMAT, MANIFEST, BackupDamaged, list_backups
from gspo_services.runs.backup.restore import restore
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.shared.settings import SCORES_DIRECTORY, read_run_settings
from tests.support.broker.archiving import Archiving, archived, content, same
from tests.support.broker.ledger import LEARNER, SAMPLING, LedgerHarness
from tests.support.processes.small_run import FIRST, _fill, write_checkpoint, write_small_run
from tests.support.runs.backups import identity, nothing
from tests.support.teacher.killed_scores import KEPT, LOST, SCORES, killed_while_it_added

BATCHES = 6


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches, of which a checkpoint covers one; the tokens of that one are archived."""
    run = tmp_path_factory.mktemp("backup") / "run"
    write_small_run(run)
    (run / "checkpoints" / "last-version").write_text("6\n")
    Archiving(run).until(lambda: bool(archived(run)))
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def harness(run: Path) -> LedgerHarness:
    from tests.support.broker.ledger import config_with

    return LedgerHarness(path=run / LEDGER_FILE, config=config_with(num_batches=BATCHES))


def train_on(run: Path, *, first: int, last: int, checkpoint_at: int | None = None) -> None:
    """A learner resumes after ``first`` batches and trains those below ``last``, some of them perhaps again and to the same
    weights; a rollout fills them."""
    broker = harness(run)
    broker.hello(FIRST)
    broker.hello(LEARNER, "learner")
    broker.send(LEARNER, Resume(next_batch=first))
    version, num_trained = broker.ledger.state.batches.newest_version, broker.ledger.state.batches.num_trained
    for index in range(first, last):
        _fill(broker, version)
        broker.request_batch(index, version)
        if index + 1 >= num_trained:
            version += index + 1 > num_trained
            broker.publish(version, index + 1)
        made = version if index + 1 >= num_trained else 0
        broker.trained(index, made)
        if index + 1 == checkpoint_at:
            broker.send(LEARNER, Checkpointed(next_batch=checkpoint_at, policy_version=made))
            write_checkpoint(run, made, checkpoint_at)
    metrics = MetricsFile(run / METRICS_FILE)
    metrics.append(broker.store.metrics_after(metrics.last))
    broker.store.close()


def test_two_backups_at_once_do_not_take_each_other_for_leftovers(run: Path, tmp_path: Path) -> None:
    refused = []

    def say(line: str) -> None:
        if not refused:
            with pytest.raises(ServiceError, match=r"another `gspo backup` of .* is writing to .*backups: wait") as caught:
                back_up(run, tmp_path / "backups", nothing)
            refused.append(caught)

    back_up(run, tmp_path / "backups", say)
    assert refused
    back_up(run, tmp_path / "backups", nothing)
    assert [manifest.number for _, manifest in list_backups(tmp_path / "backups")] == [1, 2]


@pytest.mark.parametrize("number", [1, 2])
def test_backups_to_two_places_hold_the_checkpoints_each_for_itself(number: int, run: Path, tmp_path: Path) -> None:
    """The second one begins and ends while the first copies its ``number``-th checkpoint."""
    train_on(run, first=1, last=4, checkpoint_at=4)
    seen: set[str] = set()

    def say(line: str) -> None:
        name = line.split("/")[1] if line.startswith("checkpoints/version") else ""
        if name and name not in seen and len(seen) == number - 1:
            back_up(run, tmp_path / "second", nothing)
            # What the learner removes meanwhile is held.
            shutil.rmtree(run / "checkpoints" / "version-0000000002-batch-0000000001", ignore_errors=True)
        seen.update([name] if name else [])

    first, manifest = back_up(run, tmp_path / "first", say)
    assert manifest.positions == [1, 4]
    for path in (first, list_backups(tmp_path / "second")[0][0]):
        checkpoints = {name.split("/")[1] for name in list_backups(path)[0][1].files if "/version-" in name}
        assert len(checkpoints) == 2
        restore(path, tmp_path / f"{path.parent.name}-again", None, nothing)
    assert not [*run.glob(".backup-*"), *run.glob(".operation-*")]


def test_a_backup_comes_back_in_another_directory_and_trains_on(run: Path, tmp_path: Path) -> None:
    path, manifest = back_up(run, tmp_path / "backups", nothing)
    assert manifest.positions == [1]
    assert not list(run.glob(".backup-*"))
    restored = tmp_path / "again"
    restore(tmp_path / "backups", restored, None, nothing)
    assert audit_run(restored).problems == []
    assert same(content(restored), content(run))
    assert identity(restored) not in ("run", "")
    assert read_run_settings(restored).run.directory == restored
    assert (restored / "checkpoints" / "last-version").read_text() == "6\n"
    train_on(restored, first=1, last=5)
    audit = audit_run(restored)
    assert audit.problems == []
    assert audit.num_batches == 5
    assert identity(run) == "run"
    assert list_backups(tmp_path / "backups") == [(path, manifest)]


def test_what_a_teacher_said_comes_back_although_it_is_being_added_to(run: Path, tmp_path: Path) -> None:
    record = ScoreRecord(run / SCORES_DIRECTORY, 0)
    record.add({b"first": np.ones(3, np.float32)})
    with closing(sqlite3.connect(run / SCORES_DIRECTORY / "rank-0.sqlite")) as writer:
        writer.execute("INSERT INTO scores VALUES (?, ?)", (b"second", b""))
        back_up(run, tmp_path / "backups", nothing)
    restore(tmp_path / "backups", tmp_path / "again", None, nothing)
    found = ScoreRecord(tmp_path / "again" / SCORES_DIRECTORY, 0).find([b"first", b"second"])
    assert {key: values.tolist() for key, values in found.items()} == {b"first": [1.0, 1.0, 1.0]}


def test_what_a_killed_rank_left_half_written_is_not_in_a_backup(run: Path, tmp_path: Path) -> None:
    killed_while_it_added(run / SCORES_DIRECTORY)
    back_up(run, tmp_path / "backups", nothing)
    restore(tmp_path / "backups", tmp_path / "again", None, nothing)
    found = ScoreRecord(tmp_path / "again" / SCORES_DIRECTORY, 3).find([KEPT, LOST])
    assert {key: values.tolist() for key, values in found.items()} == {KEPT: SCORES.tolist()}


def test_the_learner_of_a_restored_run_does_not_look_for_the_former_runs_ledger(run: Path, tmp_path: Path) -> None:
    note = {"learner": "a", "newest": 6, "given": [], "commits": [["run", 5, "d"]]}
    (run / "checkpoints" / "last-version").write_text(json.dumps(note))
    back_up(run, tmp_path / "backups", nothing)
    restore(tmp_path / "backups", tmp_path / "again", None, nothing)
    assert json.loads((tmp_path / "again" / "checkpoints" / "last-version").read_text()) == {
        name: value for name, value in note.items() if name != "commits"
    }


def test_the_ledger_may_be_written_while_it_is_copied(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = harness(run)
    group = GroupRow(group_id=900, split="train", prompt=11, task_index=1, evaluation=None, status="open", sampling=SAMPLING)
    members = [TrajectoryRow(trajectory_id=900 + place, group_id=900) for place in range(2)]
    monkeypatch.setattr("gspo_services.runs.backup.ledger._PAGES", 1)
    monkeypatch.setattr("gspo_services.runs.backup.ledger._SAID_FROM", 0)

    def meanwhile(line: str) -> None:
        if line == "ledger: 50 %" or not broker.store.rows(GroupRow, "WHERE group_id = 900"):
            broker.store.commit(RowChanges(rows=[group, *members]))

    path, _ = back_up(run, tmp_path / "backups", meanwhile)
    assert broker.store.rows(GroupRow, "WHERE group_id = 900") == [group]
    broker.store.close()
    assert audit_run(path).problems == []
    with reading(path) as connection:
        assert Reader(path / LEDGER_FILE, connection).rows(GroupRow, "WHERE group_id = 900") == []


def test_a_second_backup_takes_only_what_is_new_and_the_first_may_be_removed(run: Path, tmp_path: Path) -> None:
    first, before = back_up(run, tmp_path / "backups", nothing)
    train_on(run, first=1, last=4, checkpoint_at=4)
    second, after = back_up(run, tmp_path / "backups", nothing)
    assert (before.positions, after.positions) == ([1], [1, 4])
    shared = [name for name in after.files if name in before.files and os.path.samefile(first / name, second / name)]
    assert sorted(name.split("/")[0] for name in shared if name != "settings.json") == [
        "archive",
        "checkpoints",
        "checkpoints",
    ]
    shutil.rmtree(first)
    restore(tmp_path / "backups", tmp_path / "again", None, nothing)
    assert audit_run(tmp_path / "again").problems == []


def test_the_last_backup_is_the_newest_although_the_clock_was_set_back(run: Path, tmp_path: Path) -> None:
    former, _ = back_up(run, tmp_path / "backups", nothing)
    former.rename(former.with_name("2099-01-01T00-00-00.000000Z"))
    train_on(run, first=1, last=4, checkpoint_at=4)
    last, _ = back_up(run, tmp_path / "backups", nothing)
    assert [path.name for path, _ in list_backups(tmp_path / "backups")] == ["2099-01-01T00-00-00.000000Z", last.name]
    assert restore(tmp_path / "backups", tmp_path / "again", None, nothing).num_batches == 4


def test_the_run_is_restored_as_it_stood_when_a_checkpoint_covered_some_batches(run: Path, tmp_path: Path) -> None:
    train_on(run, first=1, last=5, checkpoint_at=4)
    back_up(run, tmp_path / "backups", nothing)
    restored = tmp_path / "again"
    restore(tmp_path / "backups", restored, 1, nothing)
    audit = audit_run(restored)
    assert audit.problems == []
    assert audit.num_batches == 1
    assert [path.name for path in sorted((restored / "checkpoints").iterdir())] == [
        "latest",
        "version-0000000002-batch-0000000001",
    ]
    kept, whole = content(restored), content(run)
    with reading(restored) as connection:
        batched = [group for (group,) in connection.execute("SELECT group_id FROM groups WHERE status = 'batched'")]
        tokens = {
            row.trajectory_id: row.num_tokens
            for row in Reader(restored / LEDGER_FILE, connection).rows(TrajectoryRow, "")
            if row.group_id not in batched
        }
    assert same(
        {each: kept[each] for each in kept if each not in tokens}, {each: whole[each] for each in kept if each not in tokens}
    )
    assert len(kept) > len(tokens)
    train_on(restored, first=1, last=BATCHES)
    audit = audit_run(restored)
    assert audit.problems == []
    assert audit.num_batches == BATCHES
    with reading(restored) as connection:
        prompts = [prompt for (prompt,) in connection.execute("SELECT prompt FROM groups ORDER BY prompt")]
    assert prompts == list(range(len(prompts)))


def test_a_checkpoint_of_batches_that_were_trained_again_is_a_point_in_time_too(run: Path, tmp_path: Path) -> None:
    train_on(run, first=1, last=5, checkpoint_at=2)
    assert (run / "checkpoints" / "version-0000000000-batch-0000000002").is_dir()
    back_up(run, tmp_path / "backups", nothing)
    restored = tmp_path / "again"
    restore(tmp_path / "backups", restored, 2, nothing)
    audit = audit_run(restored)
    assert audit.problems == []
    assert audit.num_batches == 2
    train_on(restored, first=2, last=BATCHES)
    assert audit_run(restored).problems == []


def test_every_point_in_time_is_clean_and_trains_on(run: Path, tmp_path: Path) -> None:
    train_on(run, first=1, last=3, checkpoint_at=3)
    train_on(run, first=3, last=5, checkpoint_at=5)
    Archiving(run, keep_batches=1, file_bytes=1).until(lambda: len(archived(run)) > 8)
    back_up(run, tmp_path / "backups", nothing)
    for position in (1, 3, 5):
        restored = tmp_path / f"at-{position}"
        restore(tmp_path / "backups", restored, position, nothing)
        assert audit_run(restored).problems == [], position
        train_on(restored, first=position, last=BATCHES, checkpoint_at=BATCHES)
        Archiving(restored, keep_batches=1, file_bytes=1).until(lambda: len(archived(restored)) > 8)  # noqa: B023
        audit = audit_run(restored)
        assert (audit.problems, audit.num_batches) == ([], BATCHES), position


def test_a_number_of_batches_without_a_checkpoint_is_refused_with_those_there_are(run: Path, tmp_path: Path) -> None:
    back_up(run, tmp_path / "backups", nothing)
    with pytest.raises(ConfigurationError, match=r"--batch is 2: the checkpoints in .* cover these numbers of batches: 1"):
        restore(tmp_path / "backups", tmp_path / "again", 2, nothing)


def test_an_interrupted_backup_is_not_taken_for_one_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gspo_services.runs.backup import backup

    plain = backup.copy_and_digest
    left = [0]

    def interrupted(source: Path, destination: Path) -> str:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return plain(source, destination)

    monkeypatch.setattr(backup, "copy_and_digest", interrupted)
    for file in (1, 2, 3):
        left[0] = file
        with pytest.raises(KeyboardInterrupt):
            back_up(run, tmp_path / "backups", nothing)
        assert list_backups(tmp_path / "backups") == []
        assert not list(run.glob(".backup-*"))
        with pytest.raises(ConfigurationError, match="holds no complete backup"):
            restore(tmp_path / "backups", tmp_path / "again", None, nothing)
    left[0] = 0
    back_up(run, tmp_path / "backups", nothing)
    assert len(list((tmp_path / "backups").iterdir())) == 1


def test_a_damaged_file_of_a_backup_is_named_and_nothing_is_restored(run: Path, tmp_path: Path) -> None:
    path, manifest = back_up(run, tmp_path / "backups", nothing)
    for name in manifest.files:
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(BackupDamaged, match=name):
            restore(path, tmp_path / "again", None, nothing)
        (path / name).unlink()
        with pytest.raises(BackupDamaged, match=f"{name} is missing"):
            restore(path, tmp_path / "again", None, nothing)
        (path / name).write_bytes(whole)
    assert not (tmp_path / "again").exists()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
    (path / MANIFEST).write_text("{}")
    with pytest.raises(BackupDamaged, match="cannot be read"):
        restore(path, tmp_path / "again", None, nothing)


def test_a_backup_of_several_brokers_names_the_release_that_restores_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = back_up(run, tmp_path / "backups", nothing)
    plain = json.loads((path / MANIFEST).read_text())
    # As gspo 0.1.0 reads it: a run of one broker, whole.
    assert (plain["num_brokers"], plain["one_moment"]) == (1, True)
    (path / MANIFEST).write_text(json.dumps(plain | {"num_brokers": 2}))
    assert main(["restore", str(tmp_path / "backups"), str(tmp_path / "again")]) == 1
    assert "is of a run of 2 brokers: gspo 0.1.0 restores it" in capsys.readouterr().out
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("more", [{}, {"shape": "another"}])
def test_a_backup_of_another_format_is_refused_with_both_formats(tmp_path: Path, more: dict[str, str]) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"format": FORMAT + 1, **more}))
    with pytest.raises(BackupDamaged, match=rf"has format {FORMAT + 1}, this release reads {FORMAT}: use the release that"):
        restore(tmp_path, tmp_path / "again", None, nothing)
    assert not (tmp_path / "again").exists()


def test_a_damaged_archive_is_found_by_the_backup(run: Path, tmp_path: Path) -> None:
    (archive,) = (run / "archive").iterdir()
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    with pytest.raises(BackupDamaged, match="is damaged"):
        back_up(run, tmp_path / "backups", nothing)
    assert list_backups(tmp_path / "backups") == []


def test_nothing_is_restored_over_what_is_there(run: Path, tmp_path: Path) -> None:
    back_up(run, tmp_path / "backups", nothing)
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigurationError, match="is not empty: restore into a new directory"):
        restore(tmp_path / "backups", run, None, nothing)
    assert sorted(run.rglob("*")) == before


def test_a_checkpoint_that_the_learner_replaces_meanwhile_is_held(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gspo_services.runs.backup import ledger as backup

    snapshot = backup._snapshot

    def then_replaced(directory: Path, copy: Path, say: Callable[[str], None]) -> None:
        snapshot(directory, copy, say)
        shutil.rmtree(run / "checkpoints" / "version-0000000002-batch-0000000001", ignore_errors=True)

    monkeypatch.setattr(backup, "_snapshot", then_replaced)
    path, manifest = back_up(run, tmp_path / "backups", nothing)
    assert manifest.positions == [1]
    assert audit_run(path).problems == []
    # Gone before anything could hold it: no backup, with the reason.
    with pytest.raises(
        ServiceError, match="the ledger says that a checkpoint covers 1 batches, but no checkpoint here does"
    ):
        back_up(run, tmp_path / "others", nothing)


def test_groups_that_were_requeued_are_not_rewound(run: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_FILE, isolation_level=None)) as connection:
        connection.execute("UPDATE groups SET status = 'resampled' WHERE group_id = (SELECT max(group_id) FROM groups)")
    back_up(run, tmp_path / "backups", nothing)
    with pytest.raises(StoreMismatch, match="without --batch"):
        restore(tmp_path / "backups", tmp_path / "again", 1, nothing)


def test_the_commands_say_what_they_did(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backups, again = str(tmp_path / "backups"), str(tmp_path / "again")
    assert main(["backup", str(run), backups]) == 0
    assert "3 batches, checkpoints after 1" in capsys.readouterr().out
    assert main(["backup", "--list", backups]) == 0
    assert "run" in capsys.readouterr().out
    assert main(["restore", backups, again, "--batch", "1"]) == 0
    assert "its audit is clean" in capsys.readouterr().out
    assert main(["restore", backups, again]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["backup", str(run)]) == 2
    assert "also name the directory for the backups" in capsys.readouterr().err
    settings = json.loads((tmp_path / "again" / "settings.json").read_text())
    assert settings["run"]["directory"] == again
