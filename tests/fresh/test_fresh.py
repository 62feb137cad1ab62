"""The README's two commands on machines that are not ours, with the plain package index; `make test-fresh` runs this.

GSPO_TEST_FRESH=whole runs all tests there, and not only a sample. What each machine took is in runs/fresh/report.txt.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fresh.roots import BASE, LIBRARIES, README_LISTS, ROOT, Machine
from tests.support.pages import blocks

pytestmark = [pytest.mark.fresh, pytest.mark.timeout(3 * 3600)]

FOLDER = Path(os.environ.get("GSPO_TEST_FRESH_ROOTS", ROOT / "runs" / "fresh"))
SAMPLE = "tests/unit/gspo tests/unit/protocol tests/integration/run/test_without_standby.py"
HOUR = 3600.0
WHOLE = os.environ.get("GSPO_TEST_FRESH") == "whole"


def python_312() -> Path | None:
    """The prefix of a Python 3.12 of this machine, which stands in for uv's own; uv's downloads come from a code host."""
    found = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.12.*"))
    return found[-1] if found else None


MACHINES = {
    "debian-12": Machine(FOLDER / "debian-12", "bookworm"),
    # Spaces and letters beyond ASCII are common in home directories.
    "debian-13": Machine(FOLDER / "debian-13", "trixie", checkout="/home/user/my wörk/gspo"),
    "uv-3.12": Machine(FOLDER / "uv-3.12", "bookworm", packages=(*BASE, "make", *LIBRARIES), uv_python=python_312()),
}


@pytest.fixture(scope="module", params=list(MACHINES))
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.fail("needs root and mmdebstrap (Debian: apt-get install mmdebstrap)")
    machine = MACHINES[request.param]
    if request.param == "uv-3.12" and (machine.uv_python is None or shutil.which("uv") is None):
        pytest.fail("needs uv (pip install uv) and a Python 3.12 of pyenv (pyenv install 3.12)")
    machine.remove()
    machine.make()
    yield machine
    with (FOLDER / "report.txt").open("a", encoding="utf-8") as report:
        report.write("".join(f"{request.param}: {line}\n" for line in machine.lines))
    machine.remove()


def test_too_small_a_disk_is_named_before_anything_is_downloaded(machine: Machine) -> None:
    copied = machine.run("cp -r . /tmp/copy", 600)
    assert copied.status == 0, copied.output
    done = machine.run("cp -r /tmp/copy/. . && make setup", 600, disk="1G")
    assert done.status != 0
    assert re.search(r"has [01]\.\d GB free, and the environment needs 5\.0 GB", done.output), done.output
    assert "Collecting" not in done.output


def test_a_python_without_venv_is_named_with_its_package(machine: Machine) -> None:
    if "python3-venv" not in machine.packages:
        pytest.skip("no Python of Debian's is there")
    hidden = list(machine.folder.glob("usr/lib/python3.1*/ensurepip"))
    assert hidden
    for path in hidden:
        path.rename(path.with_name("hidden"))
    done = machine.run("make setup", 600)
    for path in hidden:
        path.with_name("hidden").rename(path)
    assert done.status != 0
    assert re.search(r"sudo apt-get install python3\.1[13]-venv", done.output), done.output


def test_the_demo_learns(machine: Machine) -> None:
    set_up = machine.run("make setup", HOUR)
    assert set_up.status == 0, set_up.output
    size = machine.disk_bytes(".venv")
    source = re.findall(r"^setup: (PyTorch: .*)$", set_up.output, re.MULTILINE)[-1]
    machine.lines.append(
        f"set-up {set_up.seconds:.0f} s, {set_up.received_bytes / 1e9:.2f} GB received, .venv {size / 1e9:.2f} GB; {source}"
    )
    done = machine.run("make demo", HOUR)
    assert done.status == 0, done.output
    (learned,) = re.findall(r"^learned: ([\d.]+) -> ([\d.]+)", done.output, re.MULTILINE)
    machine.lines.append(f"make demo {done.seconds:.0f} s, held-out reward {learned[0]} -> {learned[1]}")
    assert float(learned[1]) >= 0.85


def test_every_other_command_of_the_readme_runs_as_it_stands(machine: Machine) -> None:
    """In one shell, from the checkout, after `make demo`. Its two commands with `make` have tests of their own here."""
    shown = [block.text for block in blocks("bash", pages=(ROOT / "README.md",))]
    kept = [text for text in shown if not text.startswith(("sudo ", "make "))]
    assert len(kept) == len(shown) - 2 == 2
    # The page is there until Ctrl-C.
    view = (
        'gspo() { if [ "$1" = view ]; then timeout --signal=INT 30 gspo "$@" || test $? = 124; else command gspo "$@"; fi; }'
    )
    done = machine.run("\n".join(["set -e", view, *kept]), HOUR)
    assert done.status == 0, done.output
    machine.lines.append(f"the README's other commands {done.seconds:.0f} s")


def test_an_interrupted_setup_is_finished_by_the_same_command_without_a_home_to_write_to(
    machine: Machine,
) -> None:
    for name in ("numpy", "transformers"):
        (info,) = machine.folder.glob(f"{machine.checkout[1:]}/.venv/lib/python3.1*/site-packages/{name}-*.dist-info")
        (info / "INSTALLER").unlink()
        shutil.rmtree(info.parent / name)
    (machine.folder / machine.checkout[1:] / ".venv" / ".installed").unlink()
    done = machine.run("make setup && .venv/bin/python -c 'import numpy, transformers'", HOUR, home="/nonexistent")
    assert done.status == 0, done.output
    assert done.output.count("was half installed: once more") == 2


def test_the_tests_pass(machine: Machine) -> None:
    command = "make test" if WHOLE else f".venv/bin/python -m pytest -q --numprocesses=2 --dist=loadfile {SAMPLE}"
    done = machine.run(command, 2 * HOUR)
    closing = [line for line in done.output.splitlines() if re.search(r"\d+ passed", line)]
    machine.lines.append(f"{'make test' if WHOLE else 'a sample of the tests'} {done.seconds:.0f} s: {' '.join(closing)}")
    assert done.status == 0, done.output[-20_000:]


FRAMEWORKS = ("frameworks/verifiers", "frameworks/agents", "frameworks/forms", "frameworks/more")
OTHERS = ("parity", "fuzz", "real", "view", "trackers", "tinker", *FRAMEWORKS)


def test_every_other_environment_is_installed(machine: Machine) -> None:
    if not WHOLE:
        pytest.skip("only with GSPO_TEST_FRESH=whole")
    for name in OTHERS:
        done = machine.run(f"make .venv-{name}/.installed", HOUR)
        if "make the environments with Python" in done.output:
            assert "Collecting" not in done.output
            machine.lines.append(f".venv-{name}: not for this Python, and says so")
            continue
        if lacking := re.search(r"^setup: .* sudo apt-get install (.+)$", done.output, re.MULTILINE):
            machine.install(lacking[1].split())
            done = machine.run(f"make .venv-{name}/.installed", HOUR)
        assert done.status == 0, done.output
        machine.lines.append(f".venv-{name} {done.seconds:.0f} s, {done.received_bytes / 1e6:.0f} MB received")


def test_the_environment_for_gpus_takes_a_step_on_fake_tensors(machine: Machine) -> None:
    if not WHOLE:
        pytest.skip("only with GSPO_TEST_FRESH=whole")
    if "trixie" in machine.suite:
        done = machine.run("make setup-gpu", HOUR)
        assert done.status != 0
        assert "make PYTHON=python3.12" in done.output
        assert "Collecting" not in done.output
        return
    done = machine.run("make setup-gpu && .venv-gpu/bin/python -m tests.support.learner.fake_gpu_worker steps.json", HOUR)
    assert done.status == 0, done.output
    machine.lines.append(f"make setup-gpu {done.seconds:.0f} s, {done.received_bytes / 1e9:.2f} GB received")
    steps = json.loads((machine.folder / machine.checkout[1:] / "steps.json").read_text(encoding="utf-8"))
    assert steps[""]["operations"]["aten::_fused_adamw_"] == 1


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_each_list_has_built_files_for_each_python_that_it_does_not_exclude(version: str, tmp_path: Path) -> None:
    """Most machines have no compiler. `uv` asks the plain index, and takes no sources."""
    lacking = []
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        below = re.search(r"^# Needs Python below (3\.\d+): ", text, re.MULTILINE)
        excluded = below is not None and int(version[2:]) >= int(below[1][2:])
        # PyTorch's CPU build is on an index of its own; DeepSpeed is installed from source, without compiling anything.
        if excluded or "# Needs a C compiler: " in text or path.name in ("torch-cpu.txt", "deepspeed.txt"):
            continue
        pins = tmp_path / "pins.txt"
        pins.write_text("\n".join(re.findall(r"^[A-Za-z0-9]\S*==[^\s;]+", text, re.MULTILINE)))
        words = ["uv", "pip", "compile", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", version]
        done = subprocess.run(
            [*words, "--python-platform", "x86_64-manylinux_2_34", str(pins)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lacking.append(f"{path.name}: {done.stderr}")
    assert lacking == []


def test_the_roots_have_what_the_readme_lists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"sudo apt-get install {' '.join(README_LISTS)}" in readme
