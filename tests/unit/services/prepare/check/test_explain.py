"""``gspo check --settings`` and ``--explain``: values as JSON, or explained one by one."""

import json
from pathlib import Path

import pytest

from gspo_services.prepare.check.command import main
from gspo_services.prepare.check.explain import explanation
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_configuration
from gspo_services.shared.settings.keys import all_keys, section_names

TOML = "[run]\nseed = 3\n[batch]\nmax_lag = 1\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "60")
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def test_the_values_are_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config), "--settings", "--set", "batch.group_size=3"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["run"]["seed"], values["batch"]["group_size"], values["objective"]["anchor"]) == (3, 3, "behaviour")


def test_a_key_is_explained_with_value_source_default_type_and_meaning(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_BATCH__GROUP_SIZE", "5")
    keys = ["run.seed", "batch.max_lag", "batch.group_size", "batch.mini_batches"]
    assert main([str(config), "--set", "batch.max_lag=0", "--explain", *keys]) == 0
    out = capsys.readouterr().out
    entries = {entry.partition(" = ")[0]: entry.splitlines() for entry in out.split("\n\n")}
    assert set(keys) <= entries.keys()
    assert entries["batch.max_lag"][:4] == [
        "batch.max_lag = 0",
        "    from:    --set batch.max_lag=0",
        "    default: 2",
        "    type:    integer, at least 0",
    ]
    assert entries["batch.max_lag"][4].startswith("    How old a trained token may be")
    assert "".join(line.strip() for line in entries["run.seed"][1:]).startswith(f"from:{'':4}{config}default: 0")
    assert entries["batch.group_size"][1] == "    from:    environment GSPO_BATCH__GROUP_SIZE"
    assert entries["batch.mini_batches"][1:3] == ["    from:    default", "    default: 4"]


def test_a_section_stands_for_its_keys_and_nothing_for_all(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config), "--explain", "evaluation", "evaluation.num_tasks"]) == 0
    out = capsys.readouterr().out
    assert out.count("evaluation.num_tasks = 64") == 1
    assert out.count("evaluation.every_batches = 5") == 1
    assert out.startswith("[evaluation] Held-out problems")
    assert max(map(len, out.splitlines())) <= 60
    assert main([str(config), "--explain"]) == 0
    out = capsys.readouterr().out
    assert [line.partition(" = ")[0] for line in out.splitlines() if line[:1].isalpha()] == list(all_keys())
    assert [line.partition("]")[0][1:] for line in out.splitlines() if line[:1] == "["] == list(section_names())


@pytest.mark.parametrize("width", [40, 61, 200])
def test_no_line_is_wider_than_the_terminal(config: Path, width: int) -> None:
    found = load_configuration(config, ["rollout.server_url=http://" + "x" * 300, "environment.options.a=[[1]]"], {})
    lines = list(explanation(found, [], width))
    assert max(map(len, lines)) <= width
    assert any(line.startswith("environment.options = ") for line in lines)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("max_lag", "did you mean 'batch.max_lag'?"),
        ("batch.maxlag", "unknown key; did you mean 'max_lag'?"),
        ("batsh", "did you mean 'batch'?"),
        ("batch.", "unknown key or section; did you mean 'batch'?"),
        ("zzz", "unknown key or section; known: agent, batch, broker"),
        ("", "unknown key or section; known: agent"),
        ("x" * 10_000, "unknown key or section"),
    ],
)
def test_an_unknown_key_is_answered_with_a_close_one(
    word: str, part: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), "--explain", word]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gspo check: ")
    assert part in said.err
    assert len(said.err) < 400


def test_a_renamed_key_is_answered_with_its_new_name(config: Path) -> None:
    found = load_configuration(config, (), {})
    with pytest.raises(ConfigurationError, match=r"^--explain batch\.lag: the key is called batch\.max_lag now$"):
        list(explanation(found, ["batch.lag"], 80, {"batch.lag": "batch.max_lag"}))


def test_a_removed_key_is_answered_with_the_way_out(config: Path) -> None:
    found = load_configuration(config, (), {})
    with pytest.raises(ConfigurationError, match=r"^--explain broker\.num_brokers: a run has one broker"):
        list(explanation(found, ["broker.num_brokers"], 80))


def test_a_broken_configuration_is_refused_before_it_is_explained(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("[batch]\ngrop_size = 1\n")
    assert main([str(config), "--explain"]) == 2
    assert "did you mean 'group_size'?" in capsys.readouterr().err


def test_help_teaches_explain(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "gspo check my.toml --explain batch.max_lag" in out
    assert "--explain [KEY ...]" in out
