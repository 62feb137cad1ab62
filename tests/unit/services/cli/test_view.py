"""``gspo view``: for whom it opens the page, and what it refuses."""

from pathlib import Path

import pytest

from gspo_services.cli.main import main
from gspo_services.cli.view import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_alone_needs_no_token(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu-7", "localhost.evil.example", ""])
def test_any_other_address_needs_one(host: str) -> None:
    assert not is_loopback(host)


def test_what_is_no_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert f"{tmp_path / 'nothing'} is not a directory: give the run.directory of a run" in capsys.readouterr().err


def test_an_address_of_another_host_is_refused_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path), "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "192.0.2.1:0: " in (said := capsys.readouterr().err)
    assert "Choose another port with --port" in said
