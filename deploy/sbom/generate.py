"""Writes an image's software bill of materials, as CycloneDX JSON: `python -m deploy.sbom.generate IMAGE FILE`.

    python -m deploy.sbom.generate broker dist/sbom/gspo-broker-0.1.0.cdx.json

Its components come from the image's Dockerfile and the pinned requirements that the Dockerfile installs: they are the same
wherever it is made. What the base image and Debian's packages bring along is not listed: scan the built image for that.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final = tuple(sorted(path.name.removesuffix(".Dockerfile") for path in (ROOT / "deploy" / "docker").iterdir()))
_PINNED: Final = re.compile(r"\b([A-Za-z0-9._-]+)==([0-9][\w.+!]*)")


class SbomError(RuntimeError):
    """A Dockerfile installs something that has no exact version. The text says what."""


def sbom_of(image: str, version: str) -> str:
    """The bill of materials of an image, JSON. Raises: SbomError."""
    text = (ROOT / "deploy" / "docker" / f"{image}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    bom = Bom()
    own = _package("gspo", version)
    bom.metadata.component = Component(
        name=f"gspo-{image}", version=version, type=ComponentType.CONTAINER, bom_ref=f"gspo-{image}"
    )
    parts = [own, _base(lines), *_packages(lines), *_debian(lines)]
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(bom.metadata.component, parts)
    return JsonV1Dot6(bom).output_as_string(indent=1)


def _package(name: str, version: str) -> Component:
    purl = PackageURL("pypi", None, re.sub(r"[-_.]+", "-", name).lower(), version)
    page = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION, url=XsUri(f"https://pypi.org/project/{name}/{version}/")
    )
    return Component(
        name=name, version=version, purl=purl, bom_ref=str(purl), external_references=[] if name == "gspo" else [page]
    )


def _base(lines: list[str]) -> Component:
    """The image that the Dockerfile begins with."""
    (name,) = re.findall(r"^ARG BASE=(\S+)$", "\n".join(lines), re.MULTILINE)
    repository, _, tag = name.rpartition(":")
    return Component(name=repository, version=tag, type=ComponentType.CONTAINER, bom_ref=name)


def _packages(lines: list[str]) -> Iterator[Component]:
    """Python packages: those of requirements files, and those that a line pins itself."""
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("ARG TORCH=") or " pip install " in f" {line} ":
            found |= dict(_PINNED.findall(line))
            for file in re.findall(r"-r /src/([^\s\"]+)", line):
                found |= dict(_pins(ROOT / file))
    for name, version in sorted(found.items(), key=lambda pin: pin[0].lower()):
        yield _package(name, version)


def _pins(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith(("#", "    --hash=")):
            continue
        entry = Requirement(line.strip(" \\"))
        (pin,) = [*entry.specifier] or [None]
        if pin is None or pin.operator != "==":
            raise SbomError(f"{path}: {line.strip()} has no exact version: pin it with ==")
        yield entry.name, pin.version


def _debian(lines: list[str]) -> Iterator[Component]:
    """Debian's packages of the last stage. Their versions are those of the day of the build."""
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM ")) :]
    for line in last:
        for words in re.findall(r"apt-get install ([^&]+)", line):
            for name in (word for word in words.split() if not word.startswith("-")):
                purl = PackageURL("deb", "debian", name)
                yield Component(name=name, type=ComponentType.LIBRARY, purl=purl, bom_ref=str(purl))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.sbom.generate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("image", choices=IMAGES)
    parser.add_argument("file", type=Path, help="where to write it")
    parser.add_argument("--version", default="0.1.0", help="of the image (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(sbom_of(arguments.image, arguments.version) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
