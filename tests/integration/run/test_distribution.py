"""What is installed: our three packages, ours alone, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("gspo", "protocol", "services")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing that an older build left behind gets into it."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        "dist",
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, timeout=120)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.mark.parametrize("name", PACKAGES)
def test_no_other_distribution_owns_a_package_of_our_name(name: str) -> None:
    """`protocol` and `services` are names that others use too; whoever is installed last would win."""
    assert set(packages_distributions()[name]) == {"gspo"}


def test_the_wheel_holds_every_module_of_the_packages_and_no_test(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in [*(ROOT / package).rglob("*.py"), ROOT / package / "py.typed"]
    }
    assert set(names) == expected


def test_the_wheel_alone_has_the_loss_and_the_command(wheel: Path, tmp_path: Path) -> None:
    script = (
        "import gspo.loss; "
        "assert not {'msgspec', 'zmq', 'pydantic', 'transformers'} & set(sys.modules); "
        "import services.cli.main as command; "
        "assert gspo.__file__.startswith(sys.argv[1]) and command.__file__.startswith(sys.argv[1])"
    )
    # -I -S: neither this checkout nor the editable installation; third parties by their folder alone.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    third_parties = str(Path(pytest.__file__).parents[1])
    start = f"import sys; sys.path[:0] = [sys.argv[1], {third_parties!r}]; {script}"
    subprocess.run([sys.executable, "-I", "-S", "-c", start, str(tmp_path)], check=True, timeout=120, cwd=tmp_path)
