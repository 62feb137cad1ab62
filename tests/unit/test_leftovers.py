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

OTHER = """
import os, subprocess, time
from pathlib import Path

def test_in_another_worker_whose_process_lives_while_the_first_one_looks():
    first = Path({first!r})
    with subprocess.Popen(["sleep", "601"]) as child:
        deadline = time.monotonic() + 60
        # The first worker tells the name of its folder, and removes the folder when it has looked.
        while not (first.exists() and not Path(first.read_text()).exists()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.kill()
"""
TELLS = """
def test_that_tells_where_it_is():
    part, whole = Path({first!r} + ".part"), Path({first!r})
    part.write_text(tempfile.gettempdir())
    part.rename(whole)
"""
KILLED = """
import os, signal, subprocess

def test_that_kills_its_worker():
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(directory: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
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
        *options,
        str(directory),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_DEBUG_TEMPROOT"}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory), "GSPO_TEST_PATIENCE_S": "1"}
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


def test_a_workers_leftovers_are_told_by_the_session_without_those_of_another_worker(tmp_path: Path) -> None:
    first = str(tmp_path / "first")
    (tmp_path / "test_other.py").write_text(OTHER.format(first=first))
    done = run(tmp_path, UNTIDY + TELLS.format(first=first), "-n", "2", "--dist", "loadfile")
    assert done.returncode == 1
    assert "4 passed" in done.stdout
    told = done.stdout[done.stdout.index("the tests left behind") :]
    assert re.findall(r"process \d+: (.*) \(worker gw[01]\)", told) == ["sleep 600"]
    assert len(re.findall(r"/forgotten-\w+-\S+ \(worker", told)) == 2
    assert "sleep 601" not in told
    assert not list(tmp_path.glob("gspo-tests-*"))


def test_what_a_killed_worker_leaves_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, KILLED, "-n", "1", "--max-worker-restart", "0")
    assert done.returncode == 1
    told = done.stdout[done.stdout.index("the tests left behind") :]
    assert re.findall(r"process \d+: (.*)", told) == ["sleep 600"]
    assert re.search(r"temporary folder \S+/gw0-", told)
    assert not list(tmp_path.glob("gspo-tests-*"))
