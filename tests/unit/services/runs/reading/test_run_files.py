"""A run's files as typed rows: a small real run, of an ended broker and of one that writes meanwhile."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from gspo_services.broker.store import LEDGER_FILE, NoLedger, OtherSchema, StoreCorrupt
from gspo_services.runs.metrics import MetricsFollower
from gspo_services.runs.reading import open_run, process_events
from tests.support.broker.ledger import LEARNER, LedgerHarness
from tests.support.processes.small_run import FIRST, write_small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reading") / "run"
    write_small_run(directory)
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_run_as_a_whole(run: Path) -> None:
    with open_run(run) as reading:
        facts = reading.facts()
    assert (facts.run_id, facts.num_batches, facts.num_trained, facts.policy_version) == ("run", 3, 3, 5)
    assert (facts.num_groups, facts.num_trajectories, facts.is_live) == (11, 22, False)
    assert facts.settings is not None
    assert facts.settings.run.num_batches == 3
    assert facts.settings_error == ""


def test_batches_have_the_versions_of_each_training(run: Path) -> None:
    with open_run(run) as reading:
        batches = list(reading.batches())
        assert [batch.trained_versions for batch in batches] == [(2,), (3, 4), (5,)]
        assert [batch.policy_version for batch in batches] == [1, 2, 4]
        assert [batch.index for batch in reading.batches(1, 2)] == [1]
        assert reading.batch(3) is None


def test_groups_of_a_batch_come_in_its_order_with_rewards_and_lag(run: Path) -> None:
    with open_run(run) as reading:
        batch = reading.batch(1)
        groups = reading.groups_of_batch(1)
        members = [member for group in groups for member in group.members]
        expected = sum(member.lag or 0.0 for member in members) / len(members)
    assert batch is not None
    assert tuple(group.group_id for group in groups) == batch.group_ids
    assert {group.policy_version for group in groups} == {2}
    assert np.mean([member.reward for member in members if member.reward is not None]) == batch.stats.mean_reward
    assert expected == pytest.approx(batch.stats.mean_lag)


def test_groups_are_chosen_by_what_became_of_them(run: Path) -> None:
    with open_run(run) as reading:
        assert [group.group_id for group in reading.groups(drop_reason="failed")] == [0]
        dropped = [group.drop_reason for group in reading.groups(status="dropped")]
        assert sorted(filter(None, dropped)) == ["failed", "stale", "stale"]
        first, *others = reading.groups(split="train", first=3)
        assert first.group_id == 3
        assert len(others) == 7
        assert [group.group_id for group in reading.groups(first=2, end=4)] == [2, 3]
        (group,) = reading.groups(task_index=first.task_index, first=3, end=4)
        assert group == first


def test_pages_leave_nothing_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_services.runs.reading.run_files.PAGE", 3)
    with open_run(run) as reading:
        assert [each.trajectory_id for each in reading.trajectories()] == list(range(22))
        assert [group.group_id for group in reading.groups()] == list(range(11))


def test_a_trajectory_says_which_leases_made_it(run: Path) -> None:
    """An episode of group 1 was continued by another rollout after its lease ran out."""
    with open_run(run) as reading:
        (resumed,) = [each for each in reading.trajectories() if len(reading.tokens(each.trajectory_id).leases) > 1]
        tokens = reading.tokens(resumed.trajectory_id)
    first, second = tokens.leases
    assert (first.start, first.num_tokens, first.skipped_epochs) == (0, 2, 0)
    assert (second.start, second.epoch, second.skipped_epochs) == (2, first.epoch + 1, 0)
    assert tokens.num_tokens == resumed.num_tokens == first.num_tokens + second.num_tokens
    assert tokens.epochs_T.tolist() == [first.epoch] * 2 + [second.epoch] * second.num_tokens
    assert sum(chunk.num_tokens for chunk in tokens.chunks) == resumed.num_tokens


def test_tokens_have_versions_and_kinds(run: Path) -> None:
    with open_run(run) as reading:
        for trajectory in reading.trajectories():
            tokens = reading.tokens(trajectory.trajectory_id)
            actions_T = tokens.is_action_T
            assert int(actions_T.sum()) == trajectory.num_action_tokens
            assert (tokens.versions_T[~actions_T] == -1).all()
            if trajectory.mean_version is not None:
                assert tokens.versions_T[actions_T].mean() == trajectory.mean_version
                assert int(tokens.versions_T[actions_T].min()) == trajectory.min_version


def test_lines_are_those_of_the_file(run: Path) -> None:
    with open_run(run) as reading:
        lines = list(reading.lines().after())
        assert lines == list(MetricsFollower(run / "metrics.jsonl").rows())
        assert list(reading.lines().after(lines[1]["line"])) == lines[2:]
        assert {line["event"] for line in reading.lines().after(0, "dropped")} == {"dropped"}


def test_reading_changes_nothing(run: Path) -> None:
    before = files_of(run)
    with open_run(run) as reading:
        reading.facts()
        for trajectory in reading.trajectories():
            reading.tokens(trajectory.trajectory_id)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reading.select("DELETE FROM chunks")
    assert files_of(run) == before


def test_a_live_run_is_read_as_it_stood_and_its_broker_goes_on(tmp_path: Path) -> None:
    broker = LedgerHarness(path=tmp_path / LEDGER_FILE)
    broker.hello(FIRST)
    broker.hello(LEARNER, "learner")
    broker.publish(1, 0)
    (lease,) = broker.lease(FIRST, 1)
    broker.grow(FIRST, lease, 2, 1)
    with open_run(tmp_path) as reading:
        assert reading.facts().is_live
        assert "settings.json" in reading.facts().settings_error
        broker.grow(FIRST, lease, 3, 1)
        assert reading.tokens(lease.trajectory_id).num_tokens == 2
    with open_run(tmp_path) as reading:
        assert reading.tokens(lease.trajectory_id).num_tokens == 5
        trajectory = reading.trajectory(lease.trajectory_id)
    assert trajectory is not None
    assert (trajectory.holder, trajectory.status, trajectory.reward) == ("rollout-0", "leased", None)
    broker.store.close()


def test_another_schema_and_no_ledger_are_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NoLedger, match="is no run directory"), open_run(tmp_path):
        pass
    connection = sqlite3.connect(tmp_path / LEDGER_FILE)
    connection.execute("CREATE TABLE batches (batch INTEGER)")
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(OtherSchema, match="schema 3, this release reads 2: a newer release"), open_run(tmp_path):
        pass


def test_a_damaged_chunk_is_named_and_the_others_are_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / LEDGER_FILE).write_bytes((run / LEDGER_FILE).read_bytes())
    connection = sqlite3.connect(tmp_path / LEDGER_FILE)
    connection.execute("UPDATE chunks SET token_ids = zeroblob(length(token_ids)) WHERE trajectory_id = 3")
    connection.commit()
    connection.close()
    with open_run(tmp_path) as reading:
        with pytest.raises(StoreCorrupt, match="trajectory 3: the chunk at 0 was changed on the disk"):
            reading.tokens(3)
        assert reading.tokens(4).num_tokens > 0


def test_logs_give_what_happened_to_processes_and_skip_what_is_no_line(tmp_path: Path) -> None:
    def line(event: str, second: int, **fields: object) -> bytes:
        stamp = f"2026-01-02T03:04:{second:02d}.500000Z"
        return json.dumps({"event": event, "level": "info", "timestamp": stamp, **fields}).encode() + b"\n"

    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "broker.log.1").write_bytes(line("hello", 1, peer="rollout-0") + line("group_complete", 2))
    (logs / "broker.log").write_bytes(
        b'\xff\xfe "hello"\n'
        + b'{"event": "hello"}\n'
        + b'"hello"\n'
        + line("peer_forgotten", 9, peer="rollout-0")
        + b'{"event": "goodbye'
    )
    events = list(process_events(tmp_path))
    assert [(each.process, each.event, each.fields["peer"]) for each in events] == [
        ("broker", "hello", "rollout-0"),
        ("broker", "peer_forgotten", "rollout-0"),
    ]
    assert events[1].time - events[0].time == pytest.approx(8.0)
    assert list(process_events(tmp_path / "nowhere")) == []
