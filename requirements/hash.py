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
EXTRA = {
    "torch.txt": {
        "torch": (
            "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
            "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
            "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
        )
    },
}
"""The CPU builds for CPython 3.11, 3.12 and 3.13 on x86-64, torch-2.13.0+cpu, which PyPI does not have. PyPI's files for
aarch64 have no CUDA, so they are listed; those for x86-64 are not, because they need CUDA's libraries."""
LEFT_OUT = {("torch.txt", "x86_64")}


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
    found: dict[str, set[str]] = {key: set(each) for key, each in EXTRA.get(name, {}).items()}
    for python, machine in TARGETS:
        if (name, machine) in LEFT_OUT:
            continue
        for package in compiled(pins, python, machine):
            files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
            found.setdefault(_key(package["name"]), set()).update(file["hashes"]["sha256"] for file in files)
    missing = [pin for pin in pins if not found.get(_key(pin.partition("==")[0]))]
    if missing:
        sys.exit(f"{name}: no file was found of {', '.join(missing)}")
    return found


def compiled(pins: list[str], python: str, machine: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--python-version", python]
        platform = f"{machine}-manylinux_2_34"
        done = subprocess.run(
            [*command, "--python-platform", platform, "-", "-o", str(lock)], input="\n".join(pins), text=True, check=False,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode:
            sys.stderr.write(f"{python} on {machine}: {done.stderr.strip()}\n")
            return []
        return tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]


def _key(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
