"""Checks of the kustomization files themselves, for mistakes that kustomize does not report."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.cluster import Object

FILE = "kustomization.yaml"


def read(directory: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((directory / FILE).read_text(encoding="utf-8")))


def parts(directory: Path) -> Iterator[Path]:
    """``directory`` and all kustomizations that it includes."""
    yield directory
    content = read(directory)
    for name in [*content.get("resources", []), *content.get("components", [])]:
        path = (directory / name).resolve()
        if path.is_dir():
            yield from parts(path)


def lost_patches(directory: Path, objects: list[Object]) -> Iterator[str]:
    """Patches with a target that is not among the rendered objects: kustomize drops them without a message."""
    for part in parts(directory):
        for patch in read(part).get("patches", []):
            target = patch.get("target")
            if target is None or target.get("kind") == "LeaderWorkerSet" or target.get("name") == "tools":
                continue  # Beside one for StatefulSets, which these replace; a component that may be left out.
            if not any(_is_target(target, item) for item in objects):
                yield f"{part.name}: {patch.get('path', 'patch')} is for {target}, which is not there"


def _is_target(target: Object, item: Object) -> bool:
    metadata = item["metadata"]
    if not re.fullmatch(target.get("kind", ".*"), item["kind"]) or not re.fullmatch(
        target.get("name", ".*"), metadata["name"]
    ):
        return False
    selector = target.get("labelSelector")
    if selector is None:
        return True
    match = re.fullmatch(r"(\S+) in \(([^)]*)\)", selector)
    if match is None:
        raise ValueError(f"labelSelector {selector!r}: the check supports only `key in (a, b)`")
    return metadata.get("labels", {}).get(match[1]) in [value.strip() for value in match[2].split(",")]


def files_of(directory: Path) -> set[Path]:
    """Files that the kustomization of ``directory`` names."""
    content = read(directory)
    named = [
        *content.get("resources", []),
        *content.get("configurations", []),
        *(patch["path"] for patch in content.get("patches", []) if "path" in patch),
    ]
    for generator in [*content.get("configMapGenerator", []), *content.get("secretGenerator", [])]:
        named += [entry.rpartition("=")[2] for entry in generator.get("files", [])]
    return {directory / name for name in named}
