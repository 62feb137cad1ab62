"""`gspo setup`: what a run needs, into the environment that the command is in. What installs it: tests/unit/setup."""

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.unit.setup.checkout import Checkout, served

ROOT = Path(__file__).parents[4]


def gspo_setup(*words: str, python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'names'}:{ROOT}", "PIP_CONFIG_FILE": os.devnull, **variables}
    command = [python, "-m", "gspo_services.cli.main", "setup", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With pip, which takes seconds to make: those who change it take a copy."""
    folder = tmp_path_factory.mktemp("environment") / "new"
    venv.create(folder, with_pip=True)
    return folder


@pytest.mark.parametrize("words", [(), ("--gpu",)])
def test_it_installs_into_its_own_environment_and_says_what_is_wrong(words: tuple[str, ...], environment: Path) -> None:
    dead = "http://127.0.0.1:9/simple"
    done = gspo_setup(*words, python=environment / "bin" / "python", PIP_INDEX_URL=dead)
    assert done.returncode == 1
    assert f"the package index {dead} does not answer" in done.stderr


def test_without_pip_it_says_how_to_get_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = gspo_setup(python=tmp_path / "bare" / "bin" / "python")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'bare'} has no pip: add it with" in done.stderr
    assert f"the lists in {ROOT / 'requirements'}" in done.stderr


def test_the_environment_of_a_user_gets_the_lists_and_keeps_the_rest(tmp_path: Path, environment: Path) -> None:
    checkout = Checkout(tmp_path)
    shutil.copytree(environment, checkout.folder / ".venv", symlinks=True)
    (site,) = (checkout.folder / ".venv" / "lib").glob("python3.*/site-packages")
    # Other installers leave no INSTALLER behind.
    (site / "mine-1.0.dist-info").mkdir()
    with served(checkout.main) as index, served(checkout.own) as own:
        variables = {"PIP_INDEX_URL": index, "GSPO_TORCH_INDEX": own, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        script = checkout.folder / "requirements" / "setup" / "install.py"
        command = [checkout.folder / ".venv" / "bin" / "python", script, "here", "cpu"]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert checkout.installed() == {"mine-1.0", "of_cpu-1.0", "of_deepspeed-1.0", "torch-2.13.0+cpu"}
