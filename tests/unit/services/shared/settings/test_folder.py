"""Relative paths of a configuration start at its folder, and a run's settings say where that is."""

import json
import os
from pathlib import Path

import pytest

from gspo_services.shared.runtime.user_modules import USERS_FOLDER, import_named
from gspo_services.shared.settings import (
    Settings,
    load_settings,
    override_settings,
    read_run_settings,
    run_fingerprint,
    write_run_settings,
)

TEXT = """
[run]
directory = "../runs/x"
[model]
path = "models/$NAME"
[environment]
name = "math"
options = { train_path = "data/train.jsonl", sources = [{ path = "more" }], prompt_column = "path", eval_path = "/e.jsonl" }
[evaluation.sets.own]
options = { eval_path = "own.jsonl" }
[agent]
python = "python3.12"
[rollout]
python = "venv/bin/python"
[distillation]
teacher = "http://teacher:1"
[security]
keys = "~/keys"
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/run.toml").write_text(TEXT)
    monkeypatch.setenv(USERS_FOLDER, "")
    monkeypatch.setenv("NAME", "tiny")
    monkeypatch.setenv("HOME", "/home/me")


def _paths(settings: Settings) -> list[str]:
    options = settings.environment.options
    found = [settings.run.directory, settings.model.path, options["train_path"], options["sources"][0]["path"]]
    return [*map(str, found), settings.evaluation.sets["own"].options["eval_path"], settings.rollout.python]


@pytest.mark.parametrize("start", ["", "a", "a/b", "elsewhere"])
def test_paths_start_at_the_folder_of_the_file_wherever_a_command_starts(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / start).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / start)
    config = Path(os.path.relpath(tmp_path / "a/b/run.toml"))
    for path in (config, config.absolute()):
        settings = load_settings(path)
        wanted = ["a/runs/x", "a/b/models/tiny", "a/b/data/train.jsonl", "a/b/more", "a/b/own.jsonl", "a/b/venv/bin/python"]
        assert [Path(found).resolve() for found in _paths(settings)] == [tmp_path / each for each in wanted]
        options = settings.environment.options
        assert (options["eval_path"], options["prompt_column"]) == ("/e.jsonl", "path")
        # A name of a program, an address, and a home.
        others = (settings.agent.python, settings.distillation.teacher, settings.security.keys)
        assert others == ("python3.12", "http://teacher:1", "/home/me/keys")


def test_paths_that_a_file_leaves_out_start_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/run.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    settings = load_settings(Path("a/run.toml"))
    assert (settings.run.directory, settings.model.path) == (Path("a/runs/default"), Path("a/models/tiny"))


def test_the_command_line_and_the_environment_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"GSPO_RUN__DIRECTORY": "here"}
    settings = load_settings(Path("a/b/run.toml"), ["model.path=models/tiny"], environment)
    assert (settings.run.directory, settings.model.path) == (Path("here"), Path("models/tiny"))


def test_the_run_is_the_same_from_wherever_it_is_started_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for start in ("a/b", "a", "."):
        monkeypatch.chdir(tmp_path / start)
        settings = load_settings(Path(os.path.relpath(tmp_path / "a/b/run.toml")))
        (tmp_path / "a/runs/x").mkdir(parents=True, exist_ok=True)
        write_run_settings(settings)
        monkeypatch.chdir("/")
        told = read_run_settings(tmp_path / "a/runs/x")
        found |= {run_fingerprint(each) for each in (settings, told, override_settings(told, ["run.num_batches=3"]))}
        assert Path(_paths(told)[2]).resolve() == tmp_path / "a/b/data/train.jsonl"
        assert settings.for_set(settings.evaluation.sets["own"]).told_paths == settings.told_paths
    assert len(found) == 1


def test_a_run_that_is_moved_with_its_project_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(Path("a/b/run.toml"), ["security.keys=keys"])
    (tmp_path / "a/runs/x").mkdir(parents=True)
    write_run_settings(settings)
    (tmp_path / "a").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    told = read_run_settings(tmp_path / "moved/runs/x")
    assert told.model.path == tmp_path / "moved/b/models/tiny"
    # That of the command line started at the working directory.
    assert told.security.keys == str(tmp_path / "keys")


@pytest.mark.parametrize("folder", [None, 3, "", "/no/such/folder"])
def test_settings_without_a_folder_or_with_a_bad_one_start_at_the_working_directory(
    folder: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = {"run": {"directory": str(tmp_path)}, "model": {"path": "models/tiny"}}
    (tmp_path / "settings.json").write_text(json.dumps(plain if folder is None else {"folder": folder, **plain}))
    told = read_run_settings(tmp_path)
    assert told.model.path == Path(f"{folder}/models/tiny" if folder == "/no/such/folder" else "models/tiny")


def test_modules_beside_the_configuration_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/")  # What is appended below goes with it.
    (tmp_path / "a/b/beside_the_configuration.py").write_text("")
    with pytest.raises(ModuleNotFoundError, match=f"import path or in {tmp_path}$"):
        import_named("beside_the_configuration")
    load_settings(Path("a/b/run.toml"))
    assert import_named("beside_the_configuration").__file__ == str(tmp_path / "a/b/beside_the_configuration.py")
    with pytest.raises(ModuleNotFoundError, match=f"import path or in {tmp_path}/a/b or in {tmp_path}$"):
        import_named("no_such_module_there")
