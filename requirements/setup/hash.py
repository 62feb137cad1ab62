"""Writes the hash of each file that an installation may take beside its version: `make lock-hashes`; needs uv.

The versions stay as they are. Only files for CPython 3.11 to 3.13 on Linux are listed, and sources.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import product
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s\\;]+)", re.MULTILINE)
TARGETS = list(product(("3.11", "3.12", "3.13"), ("x86_64", "aarch64")))
INDEXES = {"torch-cpu.txt": "https://download.pytorch.org/whl/cpu"}
"""Lists whose files are on another index than PyPI."""


def main(files: list[str]) -> None:
    for name in files:
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        pins = {_key(package): f"{package}=={version}" for package, version in PIN.findall(text)}
        found = hashes_of(path.name, list(pins.values()))
        comments = [line for line in text.splitlines() if line.startswith("#")]
        entries = [
            " \\\n    ".join([pin, *(f"--hash=sha256:{each}" for each in sorted(found[key]))]) for key, pin in pins.items()
        ]
        path.write_text("\n".join([*comments, *entries]) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path}: {len(pins)} packages, {sum(map(len, found.values()))} hashes\n")


def hashes_of(name: str, pins: list[str]) -> dict[str, set[str]]:
    """By canonical name of the package."""
    found: dict[str, set[str]] = {}
    for python, machine in TARGETS:
        for package in compiled(pins, python, machine, INDEXES.get(name)):
            files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
            found.setdefault(_key(package["name"]), set()).update(file["hashes"]["sha256"] for file in files)
    missing = [pin for pin in pins if not found.get(_key(pin.partition("==")[0]))]
    if missing:
        sys.exit(f"{name}: no file was found of {', '.join(missing)}")
    return found


def compiled(pins: list[str], python: str, machine: str, index: str | None) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--python-version", python]
        command += ["--index-url", index] if index else []
        platform = f"{machine}-manylinux_2_34"
        done = subprocess.run(
            [*command, "--python-platform", platform, "-", "-o", str(lock)], input="\n".join(pins), text=True, check=False,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode:
            # A list that lacks the files of one Python would fail there only.
            sys.exit(f"no file for Python {python} on {machine}: {done.stderr.strip()}")
        return tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]


def _key(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
