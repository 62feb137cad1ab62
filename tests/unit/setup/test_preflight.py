"""What an installation lacks is said before anything is downloaded."""

import os
import platform
import sys
import venv
from pathlib import Path

import pytest

from tests.unit.setup.checkout import Checkout, served

sys.path.insert(0, str(Path(__file__).parents[3] / "requirements" / "setup"))
import preflight
import pytorch
from pip_calls import LOCKED, Pip, SetupError, way_out

sys.path.pop(0)

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version:  gcc 12.2.0\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri Aug 25 00:00:00 UTC 2025\n"


def test_too_little_disk_is_named_with_what_there_is_and_what_is_needed(tmp_path: Path) -> None:
    assert preflight.complaints(tmp_path / "not" / "yet", 0.001) == []
    (line,) = preflight.complaints(tmp_path / "not" / "yet", 1e6)
    assert line.startswith(f"{tmp_path} has ")
    assert "needs 1000000.0 GB: free some" in line


def test_nothing_is_asked_of_an_index_where_the_disk_is_too_small(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    script = checkout.folder / "requirements" / "setup" / "pytorch.py"
    script.write_text(script.read_text().replace('"190 MB", 5)', '"190 MB", 1e6)'))
    with served(checkout.main) as address:
        done = checkout.setup("cpu", PIP_INDEX_URL=address)
    assert done.returncode == 1
    assert "the environment needs 1000000.0 GB" in done.stderr
    assert not (checkout.main / "asked").exists()
    assert not (checkout.folder / ".venv").exists()


def test_a_list_that_this_python_cannot_have_is_refused_with_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "# A list.\n# Needs Python below 3.13: verl has no release for it\nverl==1\n"
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    assert preflight.unmet(listed) == []
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    (line,) = preflight.unmet(listed)
    assert line.startswith("this is Python 3.13, and verl has no release for it: ")
    assert "make PYTHON=python3.12" in line


def test_a_list_that_is_compiled_names_the_compiler_and_the_headers_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = "# Needs a C compiler: pycosat is compiled here\npycosat==1\n"
    monkeypatch.setenv("CC", "sh -pthread")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda _: str(tmp_path))
    assert preflight.unmet(listed) == []
    (tmp_path / "Python.h").unlink()
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (line,) = preflight.unmet(listed)
    assert line.endswith(f"no sign of the headers of {version}. Debian, Ubuntu: sudo apt-get install {version}-dev")
    monkeypatch.setenv("CC", "no-such-compiler")
    (line,) = preflight.unmet(listed)
    assert "the C compiler no-such-compiler or the headers" in line
    assert line.endswith(f"install gcc {version}-dev")


def test_nothing_is_asked_of_an_index_for_a_list_with_a_need_that_is_not_met(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    (checkout.folder / "requirements" / "odd.txt").write_text("# Needs Python below 3.11: it is old\nodd==1.0\n")
    with served(checkout.main) as address:
        done = checkout.setup("apart", ".venv-odd", "odd.txt", PIP_INDEX_URL=address)
    assert done.returncode == 1
    assert "and it is old: make the environments with Python 3.10" in done.stderr
    assert not (checkout.main / "asked").exists()
    assert not (checkout.folder / ".venv-odd").exists()


@pytest.mark.parametrize(
    ("system", "machine", "libc", "said"),
    [
        (
            "darwin",
            "arm64",
            ("", ""),
            "this is Darwin on arm64: PyTorch, SGLang and DeepSpeed are locked for Linux on x86_64 or",
        ),
        ("linux", "riscv64", ("glibc", "2.36"), "this is Linux on riscv64"),
        ("linux", "x86_64", ("glibc", "2.31"), "the C library is glibc 2.31, and SGLang's files need glibc 2.34 or newer"),
        ("linux", "x86_64", ("", ""), "the C library is not glibc"),
    ],
)
def test_a_machine_for_which_there_are_no_files_is_named(
    system: str, machine: str, libc: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "system", system.capitalize)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    (line,) = preflight.complaints(tmp_path, 0.001)
    assert said in line


@pytest.mark.parametrize("text", [OPEN, CLOSED])
def test_a_driver_that_is_too_old_for_cuda_is_named(text: str, tmp_path: Path) -> None:
    version = tmp_path / "version"
    assert preflight.driver_too_old(version) == []
    version.write_text(text.format("580.65.06"))
    assert preflight.driver_too_old(version) == []
    version.write_text(text.format("570.124.06"))
    (line,) = preflight.driver_too_old(version)
    assert line.startswith("the GPUs' driver is 570, and requirements/gpu.txt is for CUDA 13, which needs 580")


def test_a_download_that_ends_midway_is_tried_again_from_there_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Checkout(tmp_path)
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with served(checkout.main, broken="of_cpu") as index:
        pip = Pip(tmp_path / "bare" / "bin" / "python", Path(sys.executable))
        listed = str(checkout.folder / "requirements" / "cpu.txt")
        with pytest.raises(SetupError, match="the network ended: wait until it is there again; what is installed stays"):
            pip.install(*LOCKED, "-r", listed, "--index-url", index)
    assert "Attempting to resume incomplete download (100 bytes/" in capfd.readouterr().err


def test_the_ordinary_build_leaves_out_what_another_list_brings() -> None:
    names = [pytorch.name_of(entry) for entry in pytorch.requirement_lines(pytorch.LISTS / "torch-cuda.txt")]
    brought = [pytorch.name_of(entry) for entry in pytorch.requirement_lines(pytorch.LISTS / "cpu.txt")]
    assert set(names) & set(brought) == {"triton"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "the disk is full"),
        ("urllib3.exceptions.ProtocolError: ('Connection broken: IncompleteRead(5 bytes read)')\n", "the network ended"),
        ("ERROR: No matching distribution found for six==9\n", "the package index has no locked file for this Python"),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE FILE.\n",
            "a file is not the one that was locked",
        ),
        ("ERROR: Failed building wheel for x\n", "pip could not install"),
    ],
)
def test_each_failure_of_pip_has_a_way_out(text: str, said: str) -> None:
    assert way_out(text).startswith(said)
