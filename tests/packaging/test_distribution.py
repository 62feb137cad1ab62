"""What a build makes of the checkout: every module under its import name, and nothing else."""

import ast
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest

from tests.packaging.installation import (
    BUILD,
    ROOT,
    THIRD_PARTIES,
    build_wheel,
    copy_sources,
    environment,
    environment_of_a_user,
    files_of,
    pip,
    show_third_parties,
    tools_of_a_build,
)

LISTS = {
    *(f"gspo_services/requirements/{name}.txt" for name in ("pip", "torch-cpu", "torch-cuda", "cpu", "gpu", "deepspeed")),
    *(f"gspo_services/requirements/setup/{name}.py" for name in ("install", "pip_calls", "preflight", "pytorch")),
}
"""What `gspo setup` installs, and what it runs."""
LEFT_BEHIND = (
    "build/lib/services/ghost.py",
    "build/lib/gspo_services/ghost.py",
    "build/lib/gspo/ghost.py",
    "gspo_services/ghost.py",
    "services/emptied/__pycache__/ghost.cpython-311.pyc",
)


def modules_of_the_checkout() -> set[str]:
    return {
        str(Path(name) / path.relative_to(ROOT / package))
        for name, package in {"gspo": "gspo", "gspo_protocol": "protocol", "gspo_services": "services"}.items()
        for path in [
            *(ROOT / package).rglob("*.py"),
            ROOT / package / "py.typed",
            *(ROOT / package).glob("runs/view/page/*"),
        ]
    }


def test_the_wheel_holds_every_module_of_the_packages_and_no_test(wheel: Path) -> None:
    assert set(files_of(wheel)) == modules_of_the_checkout() | LISTS
    assert all(files_of(wheel)[name] == (ROOT / name.partition("/")[2]).read_bytes() for name in LISTS)


def test_every_module_that_the_wheel_imports_from_us_is_in_it(wheel: Path) -> None:
    files = files_of(wheel)
    names = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files if name.endswith(".py")}
    imported = {
        node.module
        for name, content in files.items()
        if name.endswith(".py")
        for node in ast.walk(ast.parse(content))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0].startswith("gspo")
    }
    assert imported <= names
    assert {"gspo_services.shared.runtime.clock", "gspo_protocol.codec", "gspo.loss"} <= imported


@pytest.mark.packaging
def test_what_older_builds_left_in_the_source_tree_is_in_no_wheel(wheel: Path, tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    for name in LEFT_BEHIND:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("")
    (source / "gspo.egg-info").mkdir()
    (source / "gspo.egg-info" / "SOURCES.txt").write_text("\n".join(LEFT_BEHIND))
    before = {path.relative_to(source) for path in source.rglob("*")}
    assert files_of(build_wheel(source, tmp_path)) == files_of(wheel)
    assert {path.relative_to(source) for path in source.rglob("*") if "__pycache__" not in path.parts} <= before


@pytest.mark.packaging
def test_the_sdist_needs_setuptools_alone_and_gives_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {name for name in names if name.startswith(("deploy", "tests"))} == set()
    assert {f"gspo_services/{name}" for name in names if name.startswith("requirements/")} == LISTS
    assert files_of(build_wheel(sdist, tmp_path / "again")) == files_of(wheel)


@pytest.mark.packaging
def test_pip_installs_the_sdist_with_build_tools_of_its_own(sdist: Path, tmp_path: Path) -> None:
    """They come from the package index."""
    python = environment(tmp_path / "venv")
    pip("install", "--quiet", sdist, python=python)
    done = subprocess.run([python.with_name("gspo"), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert f"gspo-{done.stdout.split()[1]}.tar.gz" == sdist.name


def test_the_wheel_alone_has_the_loss_and_the_command(wheel: Path, tmp_path: Path) -> None:
    script = (
        "import gspo.loss; "
        "assert not {'msgspec', 'zmq', 'pydantic', 'transformers'} & set(sys.modules); "
        "import gspo_services.cli.main as command; "
        "assert gspo.__file__.startswith(sys.argv[1]) and command.__file__.startswith(sys.argv[1]); "
        "assert not {'services', 'protocol'} & set(sys.modules)"
    )
    # -I -S: neither this checkout nor the editable installation; third parties by their folder alone.
    for name, content in files_of(wheel).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    start = f"import sys; sys.path[:0] = [sys.argv[1], {str(THIRD_PARTIES)!r}]; {script}"
    subprocess.run([sys.executable, "-I", "-S", "-c", start, str(tmp_path)], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.packaging
def test_an_editable_installation_uses_the_names_of_the_checkout(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    python = environment(tmp_path / "venv")
    pip("install", *BUILD, "--editable", source, python=python, path=tools_of_a_build(tmp_path / "tools"))
    show_third_parties(python)
    outside = partial(
        subprocess.run, cwd=tmp_path, env=environment_of_a_user(), capture_output=True, text=True, timeout=60, check=True
    )
    assert "usage: gspo" in outside([python.with_name("gspo"), "--help"]).stdout
    code = (
        "import gspo_services.cli.main, gspo_protocol\n"
        "from importlib.metadata import entry_points\n"
        "(platform,) = entry_points(group='sglang.srt.platforms')\n"
        "print(gspo_services.cli.main.__file__, gspo_protocol.__file__, platform.value, sep='\\n')"
    )
    assert outside([python, "-c", code]).stdout.splitlines() == [
        str(source / "services/cli/main.py"),
        str(source / "protocol/__init__.py"),
        "gspo_services.shared.sglang_cpu:activate",
    ]
