"""What no sandbox takes is refused before anything runs."""

import math
from pathlib import Path

import pytest

from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, ProgramRefused, SandboxLimits, SandboxUnavailable
from gspo_services.tasks.sandbox.interface import MAX_FILES, check_command, check_files
from gspo_services.tasks.sandbox.walls import bubblewrap_command, folders_of


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b", "a/", "x" * 256])
def test_a_file_outside_of_the_sandbox_is_refused(name: str) -> None:
    with pytest.raises(ProgramRefused, match="relative path"):
        check_files({name: b""})


def test_files_within_the_sandbox_are_taken_up_to_a_bound() -> None:
    check_files({"a": b"", "deep/er/b.txt": b"", "..c": b""})
    with pytest.raises(ProgramRefused, match="257 files"):
        check_files({f"f{number}": b"" for number in range(MAX_FILES + 1)})
    with pytest.raises(ProgramRefused, match="bytes of files"):
        check_files({"a": bytes((64 << 20) + 1)})


@pytest.mark.parametrize("command", [[], [""], ["a\0"], ["a", 3]])
def test_a_command_is_a_list_of_texts(command: list[str]) -> None:
    with pytest.raises(ProgramRefused, match="list of texts"):
        check_command(command, b"")


@pytest.mark.parametrize("limits", [{"wall_s": 0}, {"cpu_s": math.nan}, {"memory_bytes": -1}, {"wall_s": math.inf}])
def test_a_limit_is_a_number_above_zero(limits: dict[str, float]) -> None:
    with pytest.raises(ProgramRefused, match=f"{next(iter(limits))} is {next(iter(limits.values()))}"):
        SandboxLimits(**limits)  # type: ignore[arg-type]


def test_an_interpreter_below_the_programs_own_folder_is_refused() -> None:
    with pytest.raises(ProgramRefused, match="use an interpreter elsewhere"):
        folders_of(Path("/tmp/venv/bin/python"))


def test_a_virtual_environment_brings_the_interpreter_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "environment"
    home.mkdir()
    (home / "pyvenv.cfg").write_text("home = /opt/python/bin\nversion = 3.11\n")
    monkeypatch.setattr(Path, "is_relative_to", lambda path, other: str(path).startswith(f"{other}/") and other != "/tmp")
    assert folders_of(home / "bin/python") == [home, Path("/opt/python")]


def test_the_walls_let_nothing_through() -> None:
    """What a review of the command would look for, as root and as an ordinary user."""
    for user in (None, 2_000_000_000):
        command = bubblewrap_command(Path("/usr/bin/python3"), [Path("/opt/compiler")], user)
        assert {
            "--unshare-net",
            "--unshare-pid",
            "--unshare-ipc",
            "--die-with-parent",
            "--new-session",
            "--clearenv",
        } <= set(command)
        assert "--bind" not in command
        assert command.count("--dev-bind") == 1
        assert command[command.index("--dev-bind") + 1 :][:2] == ["/dev/full", "/dev/zero"]
        assert command.index("--remount-ro") > max(index for index, word in enumerate(command) if word == "--tmpfs")
        assert ("--unshare-user" in command) == (user is None)
        assert (f"--reuid={user}" in command) == (user is not None)
        assert command[-4:-1] == ["/usr/bin/python3", "-I", "-c"]


async def test_without_bubblewrap_nothing_runs_and_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        async with LocalSandboxes(LocalOptions()).opened():
            raise AssertionError("it is open")
