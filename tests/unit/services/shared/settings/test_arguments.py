"""The command line that all processes share."""

from pathlib import Path

import pytest

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.arguments import parse_process_arguments


def test_another_process_can_be_started_with_the_same_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[batch]\nmax_lag = 1\n")
    words = [str(path), "--set", "run.seed=5", "--set", "batch.group_size=3", "--name", "rollout-4"]
    arguments = parse_process_arguments("gspo rollout", "", "rollout-0", words)
    assert arguments.name == "rollout-4"
    again = parse_process_arguments("gspo rollout", "", "rollout-0", arguments.forwarded)
    assert again == arguments
    assert (again.settings.run.seed, again.settings.batch.group_size, again.settings.batch.max_lag) == (5, 3, 1)


def test_without_a_name_the_process_has_its_default_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    assert parse_process_arguments("gspo broker", "", "broker", [str(path)]).name == "broker"


def test_a_broken_configuration_is_reported_and_not_an_exit(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        parse_process_arguments("gspo broker", "", "broker", [str(tmp_path / "absent.toml")])


def test_an_unknown_argument_exits_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_process_arguments("gspo broker", "", "broker", [str(tmp_path), "--sett", "x"])
    assert caught.value.code == 2
    assert "gspo broker" in capsys.readouterr().err


def test_a_shorthand_is_an_override_that_other_processes_are_given_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    shorthands = {"--profile": ("learner.profile=true", "say where time goes")}
    words = [str(path), "--set", "batch.max_lag=1", "--profile"]
    arguments = parse_process_arguments("gspo learner", "", "learner", words, shorthands=shorthands)
    assert (arguments.settings.learner.profile, arguments.settings.batch.max_lag) == (True, 1)
    again = parse_process_arguments("gspo learner", "", "learner", arguments.forwarded)
    assert again.settings == arguments.settings
    assert not parse_process_arguments(
        "gspo learner", "", "learner", words[:1], shorthands=shorthands
    ).settings.learner.profile
