"""requirements/gpu.txt: what each of its packages asks for is in it, as far as that package is installed here, too."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = ("services", "learner", "datasets", "agents", "judge")
LINUX = {**default_environment(), "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}


def pins(name: str) -> dict[str, str]:
    """The versions, by canonical name."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    entries = [
        Requirement(line.rstrip("\\")) for line in lines if line and not line.startswith(("#", "    --hash", "--hash"))
    ]
    assert all(re.fullmatch(r"==[\w.+!]+", str(entry.specifier)) for entry in entries), f"{name} does not pin everything"
    return {canonicalize_name(entry.name): str(entry.specifier)[2:] for entry in entries}


GPU = pins("gpu.txt") | {"deepspeed": "0.19.8"}


def installed(name: str) -> list[str]:
    """What a package asks for, if it is installed here in the version of requirements/gpu.txt."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return []
    return list(found.requires or ()) if found.version == GPU[name] else []


def unmet(texts: list[str]) -> Iterator[str]:
    for text in texts:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate(LINUX):
            continue
        pinned = GPU.get(canonicalize_name(wanted.name))
        if pinned is None or not wanted.specifier.contains(pinned, prereleases=True):
            yield f"{text}: {pinned}"


def test_it_has_what_this_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    assert list(unmet(asked)) == []


@pytest.mark.parametrize("name", ["sglang", "deepspeed", "transformers", "peft", "accelerate", "renderers", "math-verify"])
def test_it_has_what_its_largest_packages_ask_for(name: str) -> None:
    asked = installed(name)
    assert asked, f"{name} is not installed here in that version"
    assert list(unmet(asked)) == []


def test_it_has_what_every_package_asks_for_that_is_installed_here() -> None:
    found = {name: list(unmet(installed(name))) for name in sorted(GPU)}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_other_versions_than_the_tested_ones_are_known() -> None:
    """A package of the lock that is not installed here, such as SGLang's kernels, refuses the tested version of these."""
    tested = pins("cpu.txt")
    assert {name for name in tested.keys() & GPU.keys() if tested[name] != GPU[name]} == {
        "numpy",
        "python-dateutil",
        "sentencepiece",
        "triton",
    }
