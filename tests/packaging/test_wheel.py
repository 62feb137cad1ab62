"""The built wheel: what is in it, and that the loss runs where nothing but torch is installed.

Run by `make test-wheel`; needs a package index. TORCH names the requirement that brings torch.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.packaging.example import program, rewards_of
from tests.packaging.installation import ROOT, environment, files_of, pip

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]

PACKAGES = ("gspo", "gspo_protocol", "gspo_services")

OWNERS = """
from importlib.metadata import packages_distributions
owners = packages_distributions()
print(*owners["gspo"], *owners["gspo_protocol"], *owners["gspo_services"], "services" in owners, "protocol" in owners)
"""

# Environments are written for the services, which are an extra with requirements of its own.
EVERY_MODULE = """
import importlib, pkgutil, gspo
names = {module.name for module in pkgutil.walk_packages(gspo.__path__, "gspo.")}
# These say which extra they need; integrations say in their documentation which package.
with_more = ("gspo.runs", "gspo.tasks.environments", "gspo.tasks.judge", "gspo.tasks.ladders", "gspo.tiny_models")
for name in names:
    if name in with_more:
        try:
            importlib.import_module(name)
        except ImportError as error:
            assert "which is not installed here: pip install 'gspo[" in str(error), error
        else:
            raise AssertionError(name)
    elif not name.startswith(("gspo.tasks.integrations.", "gspo.tasks.judge.")):
        importlib.import_module(name)
assert names >= {"gspo.loss", "gspo.moe.experts"}, names
"""


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds torch and what torch requires."""
    python = environment(tmp_path_factory.mktemp("torch") / "venv")
    pip("install", "--quiet", *(os.environ.get("TORCH") or "torch==2.13.0").split(), python=python)
    return python


def run(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def installed(python: Path) -> set[str]:
    names = "from importlib.metadata import distributions; print(*{d.name.lower() for d in distributions()})"
    return set(run(python, names).split())


def test_the_wheel_holds_the_three_packages_with_their_types_and_no_tests(wheel: Path) -> None:
    files = set(files_of(wheel))
    assert {name.partition("/")[0] for name in files} == set(PACKAGES)
    page = {f"gspo_services/runs/view/page/{path.name}" for path in (ROOT / "services/runs/view/page").iterdir()}
    assert len(page) > 5
    names = ("pip", "torch-cpu", "torch-cuda", "cpu", "gpu", "deepspeed")
    lists = {f"gspo_services/requirements/{name}.txt" for name in names}
    assert {name for name in files if not name.endswith(".py")} == page | lists | {f"{top}/py.typed" for top in PACKAGES}
    assert not [name for name in files if "test" in Path(name).parts or Path(name).name.startswith(("test_", "conftest"))]
    assert "gspo/loss.py" in files


def test_the_loss_needs_torch_alone_and_a_plain_install_adds_numpy_alone(
    wheel: Path, torch_alone: Path, tmp_path: Path
) -> None:
    before = installed(torch_alone)
    assert not before & {"numpy", "msgpack", "msgspec", "pydantic", "pyzmq"}
    pip("install", "--quiet", "--no-deps", wheel, python=torch_alone)
    rewards = rewards_of(torch_alone, program(), tmp_path)
    assert len(rewards) == 80
    assert rewards[-1] > 0.95
    for words, lacking in (
        (["check", "run.toml"], "structlog, of the extra services, which is not installed here: pip install 'gspo["),
        (["doctor", "runs/x"], "rich, of the extra services, which is not installed here: pip install 'gspo["),
        (["view", "x"], "numpy, which is not installed here: pip install gspo"),
    ):
        done = subprocess.run([str(torch_alone.with_name("gspo")), *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"needs {lacking}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    pip("install", "--quiet", "--force-reinstall", "--no-deps", wheel, python=torch_alone)
    pip("install", "--quiet", wheel, python=torch_alone)
    assert installed(torch_alone) == before | {"gspo", "numpy"}
    assert rewards_of(torch_alone, program(), tmp_path) == rewards
    assert rewards_of(torch_alone, EVERY_MODULE, tmp_path) == []
    assert run(torch_alone, OWNERS) == "gspo gspo gspo False False"
