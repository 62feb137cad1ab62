"""The built wheel: what is in it, and that the loss runs where nothing but torch is installed.

Run by `make test-wheel`; needs a package index. TORCH names the requirement that brings torch.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.example import program, rewards_of

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SOURCES = ("gspo", "protocol", "services", "pyproject.toml", "README.md", "LICENSE")

# `protocol` and `services` are names that others could choose too.
OWNERS = """
from importlib.metadata import packages_distributions
owners = packages_distributions()
print(*owners["gspo"], *owners["protocol"], *owners["services"])
"""


def pip(python: Path | str, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a build folder behind and would put what lies there into the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip(sys.executable, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds torch and what torch requires."""
    folder = tmp_path_factory.mktemp("torch") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip(python, "install", "--quiet", *os.environ.get("TORCH", "torch==2.13.0").split())
    return python


def run(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def installed(python: Path) -> set[str]:
    names = "from importlib.metadata import distributions; print(*{d.name.lower() for d in distributions()})"
    return set(run(python, names).split())


def test_the_wheel_holds_the_three_packages_with_their_types_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in files} == {"gspo", "protocol", "services"}
    assert {name for name in files if not name.endswith(".py")} >= {
        f"{top}/py.typed" for top in ("gspo", "protocol", "services")
    }
    assert not [name for name in files if "test" in Path(name).parts or Path(name).name.startswith(("test_", "conftest"))]
    assert "gspo/loss.py" in files


def test_the_loss_needs_torch_alone_and_a_plain_install_adds_numpy_alone(
    wheel: Path, torch_alone: Path, tmp_path: Path
) -> None:
    before = installed(torch_alone)
    assert not before & {"numpy", "msgpack", "msgspec", "pydantic", "pyzmq"}
    pip(torch_alone, "install", "--quiet", "--no-deps", str(wheel))
    rewards = rewards_of(torch_alone, program(), tmp_path)
    assert len(rewards) == 80
    assert rewards[-1] > 0.95
    pip(torch_alone, "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
    pip(torch_alone, "install", "--quiet", str(wheel))
    assert installed(torch_alone) == before | {"gspo", "numpy"}
    assert rewards_of(torch_alone, program(), tmp_path) == rewards
    every_module = (
        "import importlib, pkgutil, gspo\n"
        "for module in pkgutil.iter_modules(gspo.__path__, 'gspo.'):\n"
        "    importlib.import_module(module.name)\n"
    )
    assert rewards_of(torch_alone, every_module, tmp_path) == []
    assert run(torch_alone, OWNERS) == "gspo gspo gspo"
