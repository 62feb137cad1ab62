"""The learner's numbers reach the page as they were recorded, or as a replay beside the run left them."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_services.runs.view import LearnerNumbers, WatchedRun
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.token_dump import TokenPart, write_part
from tests.support.processes.small_run import write_small_run
from tests.support.view.shown_runs import BATCH, HIGH, LOW, recorded_part


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("numbers") / "run"
    write_small_run(directory)
    return directory


@pytest.fixture(scope="module")
def part(directory: Path) -> TokenPart:
    return recorded_part(directory, BATCH)


def summed(numbers: LearnerNumbers, directory: Path) -> dict[int, dict[str, Any]]:
    run = WatchedRun("run", directory, MonotonicClock())
    try:
        with run.opened() as opened:
            return numbers.of_batch(run, opened, BATCH)
    finally:
        run.close()


def cache_of(cache: Path, directory: Path) -> Path:
    """Where a replay of the run works."""
    run = WatchedRun("run", directory, MonotonicClock())
    run.close()
    return LearnerNumbers(cache)._place(run)


def test_what_the_run_recorded_is_shown_to_the_last_digit(directory: Path, part: TokenPart, tmp_path: Path) -> None:
    numbers = LearnerNumbers(tmp_path)
    assert summed(numbers, directory) == {}
    path = write_part(directory, part, rank=0, world_size=1)
    found = summed(numbers, directory)
    run = WatchedRun("run", directory, MonotonicClock())
    tokens = numbers.tokens(run, BATCH, int(part.trajectories_S[1]))
    run.close()
    path.unlink()
    first = found[int(part.trajectories_S[0])]
    assert (first["source"], first["clipped"], first["log_s"]) == ("recorded", 1.0, 0.0123456789)
    (sequence,) = first["sequences"]
    assert (sequence["low"], sequence["high"], sequence["n"]) == (LOW, HIGH, part.counts_S[0])
    begin = int(part.counts_S[0])
    assert tokens[0]["learner"] == part.learner_T[begin : begin + int(part.counts_S[1])].tolist()
    assert tokens[0]["clip"] == [0] * int(part.counts_S[1])


@pytest.mark.parametrize(
    ("verdict", "source"), [("same", "replayed"), ("not recorded", "replayed"), ("different", "differs")]
)
def test_a_replay_that_came_to_other_weights_says_so(
    verdict: str, source: str, directory: Path, part: TokenPart, tmp_path: Path
) -> None:
    work = cache_of(tmp_path, directory) / "replay"
    work.mkdir(parents=True)
    write_part(work, part, rank=0, world_size=1)
    (work / "replay.json").write_text(json.dumps({"weights": {str(BATCH + 1): verdict}}))
    found = summed(LearnerNumbers(tmp_path), directory)
    assert {each["source"] for each in found.values()} == {source}


def test_a_damaged_record_is_an_error_that_names_its_file(directory: Path, part: TokenPart, tmp_path: Path) -> None:
    path = write_part(directory, part, rank=0, world_size=1)
    path.write_bytes(path.read_bytes()[:100])
    try:
        with pytest.raises(ValueError, match=f"{path.name}: not what a learner recorded"):
            summed(LearnerNumbers(tmp_path), directory)
    finally:
        path.unlink()
