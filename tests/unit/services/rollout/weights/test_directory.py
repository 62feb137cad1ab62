"""Where fetched weights lie: a place of its own for each rollout of each run, empty at the start and gone at the end."""

from pathlib import Path

import pytest

from services.rollout.weights.directory import weights_directory
from services.runtime.errors import ConfigurationError
from services.runtime.settings.sections import Rollout, Run, Settings


def settings(parent: Path, run: str = "run") -> Settings:
    return Settings(run=Run(directory=parent / run), rollout=Rollout(weights_directory=parent))


def test_what_a_killed_rollout_has_left_is_gone_when_it_starts_again(tmp_path: Path) -> None:
    first = weights_directory(settings(tmp_path), "rollout-0")
    directory = first.__enter__()
    (directory / "version-7").mkdir()
    (directory / "version-7" / "model.safetensors").write_bytes(b"x" * 1000)
    # It is killed here: nobody leaves the context.
    with weights_directory(settings(tmp_path), "rollout-0") as again:
        assert again == directory
        assert list(again.iterdir()) == []
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
