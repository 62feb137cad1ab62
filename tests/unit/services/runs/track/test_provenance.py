"""What a tracker is told about settings and code."""

import subprocess
from pathlib import Path

import pytest

from gspo_services.runs.track import provenance
from gspo_services.runs.track.provenance import code_version, flat_settings
from gspo_services.shared.settings import HIDDEN, Settings, override_settings


def test_settings_are_flat_and_have_every_key() -> None:
    flat = flat_settings(Settings())
    assert flat["batch.max_lag"] == 2
    assert flat["model.dtype"] == "float32"
    assert flat["trackers.to"] == "[]"
    assert all(isinstance(value, str | int | float | bool) for value in flat.values())


def test_what_may_be_a_secret_is_hidden() -> None:
    options = [
        "environment.options.api_key=sk-1",
        "environment.options.token_limit=5",
        "environment.options.deep.password=x",
    ]
    flat = flat_settings(override_settings(Settings(), [*options, 'agent.environment.ANY="thing"']))
    assert flat["environment.options.api_key"] == flat["environment.options.deep.password"] == HIDDEN
    assert flat["agent.environment.ANY"] == HIDDEN
    assert flat["environment.options.token_limit"] == 5
    assert "sk-1" not in str(flat)


def test_the_commit_of_the_users_project_is_recorded_and_whether_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b@c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert "project_commit" not in code_version(tmp_path)
    git("init", "-q")
    (tmp_path / "reward.py").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    assert code_version(tmp_path)["project_commit"] == git("rev-parse", "HEAD")
    (tmp_path / "reward.py").write_text("2\n")
    assert code_version(tmp_path)["project_commit"] == git("rev-parse", "HEAD") + "+changes"


def test_a_wheel_inside_the_users_repository_does_not_take_its_commit_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    command = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=a",
        "-c",
        "user.email=b@c",
        "commit",
        "--allow-empty",
        "-qm",
        "x",
    ]
    subprocess.run(command, check=True)
    site_packages = tmp_path / ".venv" / "site-packages"
    site_packages.mkdir(parents=True)
    monkeypatch.setattr(provenance, "CHECKOUT", site_packages)
    found = code_version(tmp_path)
    assert "commit" not in found
    assert len(found["project_commit"]) == 40
