"""``gspo keys`` as a person calls it."""

from pathlib import Path

import pytest

from gspo_services.cli.main import main
from gspo_services.shared.net.security import read_public_keys
from tests.support.wire.keys import secrets_in


def test_the_keys_of_all_roles_are_made_with_a_list_of_the_files_for_each_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", str(directory)]) == 0
    assert sorted(read_public_keys(directory).values()) == ["broker", "learner", "operator", "rollout"]
    said = capsys.readouterr().out
    for part in (str(directory / "learner.secret"), "security.keys", "operator.secret   and broker.public"):
        assert part in said
    assert len(secrets_in(directory)) == 4
    assert not [secret for secret in secrets_in(directory) if secret in said]


def test_a_key_for_one_peer_is_added_beside_them(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path)]) == 0
    assert main(["keys", str(tmp_path), "--name", "rollout-7", "--name", "operator-alice"]) == 0
    assert len(read_public_keys(tmp_path)) == 6


def test_without_force_no_key_is_replaced_and_none_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path), "--name", "rollout"]) == 0
    before = secrets_in(tmp_path)
    assert main(["keys", str(tmp_path)]) == 2
    assert "rollout.secret already exists" in capsys.readouterr().err
    assert secrets_in(tmp_path) == before
    assert main(["keys", str(tmp_path), "--force"]) == 0
    assert before[0] not in secrets_in(tmp_path)


def test_a_misspelt_role_is_answered_with_the_possible_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path), "--name", "rolout-7"]) == 2
    assert "expected a role (broker, learner, rollout, operator)" in capsys.readouterr().err
