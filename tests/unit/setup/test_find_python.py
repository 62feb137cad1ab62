"""requirements/setup/setup.sh: which Python it takes, and what it says where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.setup.checkout import SCRIPTS

INSTALL = "import sys; print('installs', sys.argv[1:], sys.executable)\n"
TOOLS = ("sh", "head", "cut", "env")


class Machine:
    """A checkout, a home and a PATH, with the programs that a test puts there and none of this machine's Pythons."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.home, self.path = folder / "check out", folder / "hôme", folder / "b in"
        setup = self.checkout / "requirements" / "setup"
        for path in (setup, self.home, self.path):
            path.mkdir(parents=True)
        shutil.copy(SCRIPTS / "setup.sh", setup)
        (setup / "install.py").write_text(INSTALL)
        for tool in TOOLS:
            (self.path / tool).symlink_to(str(shutil.which(tool)))

    def put(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('sh')}\n{text}\n")
        path.chmod(0o755)
        return path

    def python(self, path: Path) -> Path:
        """This test's Python under another path."""
        return self.put(path, f'exec "{sys.executable}" "$@"')

    def old(self, path: Path, version: str) -> Path:
        return self.put(path, f'[ "$1" = -V ] && echo Python {version}; exit 1')

    def without_venv(self, path: Path) -> Path:
        """As Debian's python3 is without the package python3-venv."""
        return self.put(path, f'case "$2" in *ensurepip*) exit 1;; *) exec "{sys.executable}" "$@";; esac')

    def setup(self, python: str = "") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.path), "HOME": str(self.home), "PYTHON": python}
        command = ["sh", "requirements/setup/setup.sh", "cpu"]
        return subprocess.run(
            command, cwd=self.checkout, env=environment, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_python3_is_taken_where_it_is_new_enough(machine: Machine) -> None:
    machine.python(machine.path / "python3")
    machine.put(machine.path / "python3.11", "echo the wrong one")
    done = machine.setup()
    assert (done.returncode, done.stdout) == (0, f"installs ['cpu'] {sys.executable}\n"), done.stderr


@pytest.mark.parametrize("name", ["python3.11", "python3.12", "python3.13"])
def test_another_python_on_the_path_is_taken_where_python3_is_too_old_or_too_new(machine: Machine, name: str) -> None:
    machine.old(machine.path / "python3", "3.14.1" if name == "python3.13" else "3.10.2")
    machine.python(machine.path / name)
    assert machine.setup().returncode == 0


def test_a_python_of_pyenv_or_of_uv_is_found(machine: Machine) -> None:
    pyenv = machine.python(machine.home / ".pyenv" / "versions" / "3.12.7" / "bin" / "python3")
    assert machine.setup().returncode == 0
    pyenv.unlink()
    theirs = machine.python(machine.home / "uv's own" / "python3.12")
    machine.put(machine.path / "uv", f'[ "$1 $2" = "python find" ] && echo "{theirs}"')
    assert machine.setup().returncode == 0


def test_a_python_without_venv_is_passed_over_and_else_named_with_the_package(machine: Machine) -> None:
    bare = machine.without_venv(machine.path / "python3")
    done = machine.setup()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.returncode == 1
    assert f"{bare} (Python {version}) cannot make virtual environments" in done.stderr
    assert f"sudo apt-get install python{version}-venv" in done.stderr
    machine.python(machine.path / "python3.11")
    assert machine.setup().returncode == 0


def test_where_no_python_fits_those_that_are_there_are_named_and_the_way_to_one(machine: Machine) -> None:
    machine.old(machine.path / "python3", "3.10.2")
    machine.old(machine.path / "python", "3.14.0")
    done = machine.setup()
    assert done.returncode == 1
    assert "no Python of 3.11 to 3.13 is here" in done.stderr
    assert "python3 (Python 3.10.2)" in done.stderr
    assert "python (Python 3.14.0)" in done.stderr
    assert "uv python install 3.13" in done.stderr
    assert done.stdout == ""


def test_a_python_that_is_named_is_the_only_one(machine: Machine) -> None:
    machine.python(machine.path / "python3")
    old = machine.old(machine.home / "python3.10", "3.10.2")
    done = machine.setup(str(old))
    assert done.returncode == 1
    assert f"{old} (Python 3.10.2)" in done.stderr
    done = machine.setup("/no/such/python")
    assert (done.returncode, done.stderr) == (1, "setup: PYTHON=/no/such/python: there is no such program\n")


def test_the_python_of_the_environment_stays(machine: Machine) -> None:
    machine.python(machine.checkout / ".venv" / "bin" / "python")
    machine.put(machine.path / "python3", "echo the wrong one")
    done = machine.setup()
    assert done.returncode == 0
    assert done.stdout.startswith("installs ['cpu'] ")
