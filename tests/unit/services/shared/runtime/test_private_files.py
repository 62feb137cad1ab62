"""Whose the files of a run are, whatever the umask."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.cli.main import main
from gspo_services.shared.runtime.private_files import keep_private, open_to_all
from tests.support.broker.process import BrokerProcess
from tests.support.processes.small_run import write_small_run


@pytest.fixture(params=[0, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes_below(directory: Path) -> dict[str, int]:
    """The rights of everybody but the owner, by path; only where there are some."""
    found = {str(path): path.lstat().st_mode & 0o077 for path in (directory, *directory.rglob("*"))}
    return {path: mode for path, mode in found.items() if mode}


def test_what_a_process_makes_is_its_users_alone(umask: int, tmp_path: Path) -> None:
    keep_private(tmp_path / "run")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "ledger.db").write_bytes(b"")
    assert modes_below(tmp_path / "run") == {}


def test_a_volume_that_gives_its_files_to_its_group_goes_on_doing_so(umask: int, tmp_path: Path) -> None:
    """As Kubernetes prepares a volume for pods with an fsGroup."""
    tmp_path.chmod(0o2775)
    keep_private(tmp_path / "runs" / "run")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o2770
    assert stat.S_IMODE((tmp_path / "runs" / "file").stat().st_mode) == 0o660
    keep_private(tmp_path / "runs", tmp_path.parent / "elsewhere")
    (tmp_path / "other").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600


def test_keys_and_backups_are_private(umask: int, tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    assert main(["keys", str(tmp_path / "keys")]) == 0
    os.umask(umask)
    assert main(["backup", str(tmp_path / "run"), str(tmp_path / "backup")]) == 0
    assert (tmp_path / "keys").exists()
    assert list((tmp_path / "backup").rglob("*"))
    assert modes_below(tmp_path / "keys") | modes_below(tmp_path / "backup") == {}


async def test_all_that_a_broker_writes_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        broker = BrokerProcess(tmp_path)
        await broker.start()
        await broker.terminate()
    finally:
        os.umask(before)
    assert (broker.run_directory / LEDGER_FILE).exists()
    assert modes_below(broker.run_directory) == {}


def test_a_directory_that_all_users_can_read_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        run = Path(folder) / "run"
        run.mkdir(mode=0o700)
        run.chmod(0o755)
        assert open_to_all(run) == ""
        Path(folder).chmod(0o711)
        assert open_to_all(run) == f"all users of this machine can read {run}: chmod o-rwx {run}"
        run.chmod(0o750)
        assert open_to_all(run) == ""
    assert open_to_all(run) == ""
