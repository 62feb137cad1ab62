"""Where fetched weights lie: a place of its own for each rollout of each run, empty at the start and gone at the end."""

import os
import signal
from pathlib import Path

import pytest

from gspo_services.rollout.weights.directory import weights_directory
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.sections import Rollout, Run, Settings


def settings(parent: Path, run: str = "run") -> Settings:
    return Settings(run=Run(directory=parent / run), rollout=Rollout(weights_directory=parent))


def killed_within(parent: Path, *places: str) -> None:
    """A process that is in the context, writes something, and is killed: nobody leaves the context."""
    child = os.fork()
    if not child:
        directory = weights_directory(settings(parent), "rollout-0").__enter__()
        for place in places:
            (directory / place).parent.mkdir(parents=True, exist_ok=True)
            (directory / place).write_bytes(b"x" * 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_rollout_that_starts_again_finds_its_copy_and_not_what_the_engine_was_to_load(tmp_path: Path) -> None:
    killed_within(tmp_path, "weights-00000.safetensors", "loaded/version-7/model.safetensors")
    (left,) = tmp_path.iterdir()
    with weights_directory(settings(tmp_path), "rollout-0") as again:
        assert again == left
        assert [path.name for path in again.iterdir()] == ["weights-00000.safetensors"]
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_of_the_same_name_gets_a_place_of_its_own(tmp_path: Path) -> None:
    with weights_directory(settings(tmp_path), "rollout-0") as first:
        (first / "weights-00000.safetensors").write_bytes(b"first")
        killed_within(tmp_path, "weights-00000.safetensors")
        with weights_directory(settings(tmp_path), "rollout-0") as second:
            assert second != first
            assert list(second.iterdir()) == []
        assert (first / "weights-00000.safetensors").read_bytes() == b"first"
    # The place of the one that was killed is still there: the next one removes it.
    assert len(list(tmp_path.iterdir())) == 1
    with weights_directory(settings(tmp_path), "rollout-0"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_rollout_of_every_run_has_its_own(tmp_path: Path) -> None:
    with (
        weights_directory(settings(tmp_path), "rollout-0") as first,
        weights_directory(settings(tmp_path), "rollout-1") as second,
        weights_directory(settings(tmp_path, "other"), "rollout-0") as third,
    ):
        assert len({first, second, third}) == 3
        assert {path.parent for path in (first, second, third)} == {tmp_path}


def test_a_place_that_is_not_there_or_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such directory"), weights_directory(settings(tmp_path / "no"), "r"):
        pass
    with weights_directory(settings(tmp_path), "rollout-0") as directory:
        taken = directory
    taken.write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used"), weights_directory(settings(tmp_path), "rollout-0"):
        pass
