"""The numbers of policy versions: the same weights keep theirs, and other weights never get it."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo_protocol.messages import LedgerCommit, Welcome
from gspo_services.learner.checkpoints import versions as versions_module
from gspo_services.learner.checkpoints.format import CheckpointError
from gspo_services.learner.checkpoints.versions import KEPT, LAST_VERSION, Versions, known_commit, read_note
from tests.support.learner.checkpoints import newest_given
from tests.support.wire.zmq_ends import a_welcome


def begun(root: Path, welcome: Welcome, learner: str = "first") -> Versions:
    versions = Versions(root, learner)
    versions.begin(welcome)
    return versions


def give(versions: Versions, digest: str, trained_batches: int) -> int:
    """Reserve a number for weights, and note their digest."""
    number = versions.number(digest if versions.needs_digest(trained_batches) else "", trained_batches)
    versions.reserve(number, trained_batches)
    versions.note_digest(number, digest)
    return number


def after(version: int, trained_batches: int, digest: str) -> Welcome:
    return a_welcome(policy_version=version, trained_batches=trained_batches, weights_digest=digest)


def test_numbers_follow_each_other_and_nothing_is_hashed_for_them(tmp_path: Path) -> None:
    versions = begun(tmp_path, a_welcome())
    for number in range(1, 2 * KEPT):
        assert not versions.needs_digest(number - 1)
        assert versions.number("", number - 1) == number
        versions.reserve(number, number - 1)
        versions.note_digest(number, f"weights {number}")
    note = read_note(tmp_path)
    assert note is not None
    assert (note.newest, len(note.given)) == (2 * KEPT - 1, KEPT)


def test_threads_that_note_at_once_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner reserves while the last version is announced and a checkpoint is written: one file, one partial name."""
    together, replace = threading.Semaphore(1), versions_module.replace_file

    def alone(path: Path, text: str) -> None:
        assert together.acquire(blocking=False), "another thread writes the note"
        replace(path, text)
        together.release()

    monkeypatch.setattr(versions_module, "replace_file", alone)
    versions, start = begun(tmp_path, a_welcome()), threading.Barrier(3)

    def reserve() -> None:
        start.wait()
        for number in range(2, KEPT):
            versions.reserve(number, number - 1)

    def note(what: Callable[[int], object]) -> None:
        start.wait()
        for turn in range(200):
            what(turn)

    versions.reserve(1, 0)
    with ThreadPoolExecutor(3) as threads:
        done = [threads.submit(reserve), threads.submit(note, lambda turn: versions.note_commit())]
        done.append(threads.submit(note, lambda turn: versions.note_digest(1, f"w{turn}")))
        for each in done:
            each.result()


def test_the_same_weights_get_the_number_that_the_broker_knows(tmp_path: Path) -> None:
    versions = begun(tmp_path, after(9, 8, "w8"))
    assert give(versions, "w8", 8) == 9
    assert give(versions, "w9", 9) == 10


@pytest.mark.parametrize(("digest", "trained_batches"), [("other", 8), ("w8", 7)])
def test_other_weights_or_weights_of_other_batches_get_a_new_number(
    tmp_path: Path, digest: str, trained_batches: int
) -> None:
    assert give(begun(tmp_path, after(9, 8, "w8")), digest, trained_batches) == 10


def test_a_number_that_the_broker_has_not_heard_of_goes_to_the_same_weights_only(tmp_path: Path) -> None:
    """The learner is killed after an engine has fetched a version and before the broker has committed it."""
    give(begun(tmp_path, after(9, 8, "w8")), "w9", 9)
    same = begun(tmp_path, after(9, 8, "w8"), "second")
    assert [give(same, "w8", 8), give(same, "w9", 9), give(same, "w10", 10)] == [9, 10, 11]
    other = begun(tmp_path, after(9, 8, "w8"), "third")
    assert [give(other, "w8", 8), give(other, "other", 9), give(other, "w10", 10)] == [9, 12, 13]


def test_a_number_that_was_never_served_goes_to_any_weights_of_as_many_batches(tmp_path: Path) -> None:
    begun(tmp_path, after(9, 8, "w8")).reserve(10, 9)
    versions = begun(tmp_path, after(9, 8, "w8"), "second")
    assert give(versions, "w8", 8) == 9
    assert not versions.needs_digest(9)
    assert versions.number("", 9) == 10


def test_after_other_weights_no_older_number_is_given(tmp_path: Path) -> None:
    """Version 10 was reserved for the weights after 9 batches. Those that follow other weights come after them."""
    begun(tmp_path, after(9, 8, "w8")).reserve(10, 9)
    versions = begun(tmp_path, after(9, 8, "w8"), "second")
    assert [give(versions, "other", 8), give(versions, "w9", 9)] == [11, 12]


def test_a_number_is_noted_before_the_next_learner_looks(tmp_path: Path) -> None:
    versions = begun(tmp_path, a_welcome())
    versions.reserve(1, 0)
    assert newest_given(tmp_path) == 1
    versions.note_digest(1, "w0")
    note = read_note(tmp_path)
    assert note is not None
    assert [(each.policy_version, each.trained_batches, each.digest) for each in note.given] == [(1, 0, "w0")]


def test_a_learner_gives_no_numbers_after_another_one_has_begun(tmp_path: Path) -> None:
    former = begun(tmp_path, a_welcome())
    former.reserve(1, 0)
    begun(tmp_path, a_welcome(), "second")
    with pytest.raises(CheckpointError, match=r"another learner uses this run\.directory, .*newest version is 1"):
        former.note_digest(1, "w0")
    with pytest.raises(CheckpointError, match="another learner"):
        former.reserve(2, 1)
    assert newest_given(tmp_path) == 1


def test_the_note_has_how_far_the_ledger_was_and_a_learner_that_was_told_nothing_keeps_it(tmp_path: Path) -> None:
    assert known_commit(tmp_path) is None
    told = [LedgerCommit(run_id="test", number=number, digest="d") for number in (5, 7)]
    versions = Versions(tmp_path, "first", lambda: told[0])
    versions.begin(a_welcome())
    assert known_commit(tmp_path) == told.pop(0)
    versions.note_commit()
    assert known_commit(tmp_path) == told[0]
    second = begun(tmp_path, a_welcome(), "second")
    second.reserve(1, 0)
    assert known_commit(tmp_path) == told[0]


def test_a_note_of_the_first_release_still_says_how_far_the_ledger_was(tmp_path: Path) -> None:
    note = {"learner": "a", "newest": 6, "given": [], "commits": [["run", 5, "d"]]}
    (tmp_path / LAST_VERSION).write_text(json.dumps(note))
    assert known_commit(tmp_path) == LedgerCommit(run_id="run", number=5, digest="d")
    begun(tmp_path, a_welcome(), "second").reserve(7, 0)
    assert json.loads((tmp_path / LAST_VERSION).read_text())["commits"] == note["commits"]


def test_a_damaged_note_is_refused_with_the_way_out_and_a_number_that_a_person_wrote_is_taken(tmp_path: Path) -> None:
    for content in ("twelve", '{"learner":"a"', "-1", "[" * 100_000):
        (tmp_path / "last-version").write_text(content)
        with pytest.raises(CheckpointError, match=r"not a version .*write the newest version that engines served"):
            begun(tmp_path, a_welcome())
    (tmp_path / "last-version").write_text("12\n")
    assert give(begun(tmp_path, after(9, 8, "w8")), "w9", 9) == 13
