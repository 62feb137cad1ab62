"""What is installed is what the lists in requirements/ name, file by file."""

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS = sorted((ROOT / "requirements").glob("*.txt"))
ENTRY = re.compile(r"[A-Za-z0-9][\w.-]*==[\w.+!]+(?: --hash=sha256:[0-9a-f]{64})+")


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_each_package_has_one_version_and_the_hashes_of_its_files(path: Path) -> None:
    lines = re.sub(r" \\\n +", " ", path.read_text(encoding="utf-8")).splitlines()
    entries = [line for line in lines if not line.startswith("#")]
    assert entries
    assert [entry for entry in entries if not ENTRY.fullmatch(entry)] == []


@pytest.mark.parametrize("name", ["torch-cpu.txt", "torch-cuda.txt"])
def test_pytorch_is_locked_for_each_python_on_each_machine(name: str) -> None:
    """It has one file for each of three Pythons on two kinds of processor."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    (hashes,) = re.findall(r"^torch==\S+((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert len(set(re.findall(r"[0-9a-f]{64}", hashes))) == 6


def test_each_installation_from_a_list_checks_its_hashes() -> None:
    setup = sorted((ROOT / "requirements" / "setup").glob("*.py"))
    texts = [ROOT / "Makefile", *setup, *sorted((ROOT / "deploy" / "docker").iterdir())]
    lines = [line for path in texts for line in path.read_text().replace("\\\n", " ").splitlines()]
    installing = [
        line
        for line in lines
        if re.search(r"(^|[ \"])-r\b", line) and not line.lstrip().startswith("#") and " rm " not in line
    ]
    assert len(installing) > 15
    assert [line for line in installing if not re.search(r"--require-hashes|\$\(LOCKED\)|\*LOCKED", line)] == []
    assert "LOCKED := --no-deps --require-hashes\n" in (ROOT / "Makefile").read_text()
    assert 'LOCKED = ("--no-deps", "--require-hashes")\n' in (ROOT / "requirements" / "setup" / "pip_calls.py").read_text()


@pytest.mark.parametrize("is_right", [True, False])
def test_a_file_with_another_hash_is_named_and_nothing_is_installed(is_right: bool, tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    digest = hashlib.sha256(wheel.read_bytes() if is_right else b"another").hexdigest()
    (tmp_path / "list.txt").write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
    (flags,) = re.findall(r"^LOCKED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *flags.split(), "--no-index"]
    where = ["--find-links", str(tmp_path), "--target", str(tmp_path / "site"), "-r", str(tmp_path / "list.txt")]
    done = subprocess.run([*command, *where], capture_output=True, text=True, check=False, timeout=120)
    assert (tmp_path / "site" / "tiny.py").exists() == is_right, done.stderr
    assert ("DO NOT MATCH THE HASHES" in done.stderr and "tiny==1.0" in done.stderr) != is_right, done.stderr
