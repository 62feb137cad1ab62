"""A run whose learner writes to a volume of its own is copied from both, and restored to both."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from gspo_services.cli.main import main
from gspo_services.learner.teacher.record import ScoreRecord
from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.ledger import held_checkpoints
from gspo_services.shared.settings import SCORES_DIRECTORY
from tests.support.processes.small_run import write_small_run
from tests.support.runs.backups import identity, nothing

TOOLS = Path(__file__).parents[4] / "deploy" / "k8s" / "components" / "tools" / "tools.yaml"
PARTS = ("checkpoints", SCORES_DIRECTORY)


@pytest.fixture
def volume() -> Iterator[Path]:
    """The learner's: another file system than that of ``tmp_path``, so that nothing can be linked between them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def run(tmp_path: Path, volume: Path) -> Path:
    """Its ledger, with links to what its learner wrote."""
    run = tmp_path / "run"
    write_small_run(run)
    ScoreRecord(run / SCORES_DIRECTORY, 0).add({b"first": np.ones(3, np.float32)})
    for name in PARTS:
        shutil.move(run / name, volume / "run" / name)
        (run / name).symlink_to(volume / "run" / name)
    return run


def files(directory: Path) -> set[str]:
    """Of ``directory`` itself, not behind links."""
    return {str(Path(above, name).relative_to(directory)) for above, _, names in os.walk(directory) for name in names}


def test_both_volumes_are_copied_and_both_come_back(run: Path, volume: Path, tmp_path: Path) -> None:
    assert main(["backup", str(run), str(tmp_path / "backups")]) == 0
    shutil.rmtree(run)
    (volume / "run").rename(volume / "before")
    learner = volume / "run"
    assert main(["restore", str(tmp_path / "backups"), str(run), "--learner", str(learner)]) == 0
    assert audit_run(run).problems == []
    assert identity(run) != "run"
    assert files(learner) >= {name for name in files(volume / "before") if name.endswith("checkpoint.json")} != set()
    assert {(run / name).readlink() for name in PARTS} == {learner / name for name in PARTS}
    assert {name for name in files(run) if name.startswith(PARTS)} == set()
    assert set(ScoreRecord(learner / SCORES_DIRECTORY, 0).find([b"first"])) == {b"first"}
    assert {path.name for path in volume.iterdir()} == {"before", "run"}


def test_checkpoints_are_held_by_links_on_their_own_volume(run: Path, volume: Path, tmp_path: Path) -> None:
    """Not by copies on the broker's, which they would fill."""
    with held_checkpoints(run) as held:
        assert held.stat().st_dev == volume.stat().st_dev != run.stat().st_dev
    back_up(run, tmp_path / "backups", nothing)
    assert [*run.glob(".backup-*"), *(volume / "run").glob(".backup-*")] == []


@pytest.mark.parametrize("where", [".", "inside"])
def test_a_directory_of_the_learner_in_that_of_the_run_is_refused(
    where: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_up(run, tmp_path / "backups", nothing)
    again = tmp_path / "again"
    assert main(["restore", str(tmp_path / "backups"), str(again), "--learner", str(again / where)]) == 2
    assert "name a directory that is not in" in capsys.readouterr().err
    assert not again.exists()


def test_what_the_learner_has_is_not_written_over(
    run: Path, volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_up(run, tmp_path / "backups", nothing)
    before = files(volume)
    again = tmp_path / "again"
    assert main(["restore", str(tmp_path / "backups"), str(again), "--learner", str(volume / "run")]) == 2
    assert f"{volume / 'run'} is not empty" in capsys.readouterr().err
    assert (files(volume), again.exists()) == (before, False)


def script(root: Path) -> list[str]:
    """What the pod of deploy/k8s/components/tools does before it waits, with its volumes below ``root``."""
    (item,) = (each for each in yaml.safe_load_all(TOOLS.read_text()) if each["kind"] == "Deployment")
    (container,) = item["spec"]["template"]["spec"]["containers"]
    (text,) = container["args"]
    assert "exec sleep infinity" in text
    return [*container["command"], text.replace("/var/lib", str(root)).replace("exec sleep infinity", "exit 0")]
