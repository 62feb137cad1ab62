"""A test session that leaves something behind fails and names it."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TIDY = """
import subprocess, sys, tempfile

def test_that_is_tidy(tmp_path):
    with tempfile.TemporaryDirectory() as directory, subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        assert directory.startswith({directory!r})
        child.communicate(b"\\n")
    assert str(tmp_path).startswith({everybodys!r})
"""
UNTIDY = """
import os, subprocess, sys, tempfile
from pathlib import Path

def test_that_leaves_a_file(tmp_path):
    tempfile.mkdtemp(prefix="forgotten-folder-")
    tempfile.mkstemp(prefix="forgotten-file-")

def test_that_leaves_a_process_without_a_parent():
    start = (
        "import subprocess; quiet = subprocess.DEVNULL;"
        "print(subprocess.Popen(['sleep', '600'], stdout=quiet, stderr=quiet, start_new_session=True).pid)"
    )
    print("left", subprocess.run([sys.executable, "-c", start], capture_output=True, text=True).stdout)
"""


def run(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = directory / "test_one.py"
    path.write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.processes.leftovers",
        "-p",
        "no:cacheprovider",
        "-s",
        str(path),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_DEBUG_TEMPROOT"}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=120, check=False)


def test_a_session_that_leaves_nothing_passes_in_a_temporary_folder_of_its_own(tmp_path: Path) -> None:
    everybodys = str(tmp_path)
    done = run(tmp_path, TIDY.format(directory=everybodys + "/gspo-tests-", everybodys=everybodys + "/pytest-of-"))
    assert done.returncode == 0, done.stdout
    assert "left behind" not in done.stdout
    assert not list(tmp_path.glob("gspo-tests-*"))


def test_leftovers_fail_the_session_and_are_named_and_removed(tmp_path: Path) -> None:
    done = run(tmp_path, UNTIDY)
    assert done.returncode == 1
    assert "2 passed" in done.stdout
    told = done.stdout[done.stdout.index("the tests left behind") :]
    (pid,) = re.findall(r"left (\d+)", done.stdout)
    assert f"process {pid}: sleep 600" in told
    assert "temporary folder " in told
    assert "/forgotten-folder-" in told
    assert "/forgotten-file-" in told
    # It was killed and has no parent here: the system may take a moment to forget it.
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(60)
    assert not list(tmp_path.glob("gspo-tests-*"))
