"""An overlay over an overlay: patches for what a values file changes, and nothing else."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.helm.values import Object, Values, at, plain_name

FILE: Final = "kustomization.yaml"
HEADER: Final = "# Written by `python -m deploy.helm.generate`: write it anew when the overlay or its values change.\n"


class Blocks(yaml.SafeDumper):
    """Texts of several lines as blocks."""


Blocks.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def blocks(node: Any) -> str:
    """The node as YAML that people edit."""
    return yaml.dump(node, Dumper=Blocks, sort_keys=False, width=120, allow_unicode=True)


def overlay_of(values: Values, given: Object, overlay: Path, directory: Path) -> str:
    """The text of ``directory``'s kustomization: the overlay's objects as these values make them. Without the Namespace, as
    with Helm: who may only use a namespace may apply it.
    """
    content: Object = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    if given.get("namespace"):
        content["namespace"] = given["namespace"]
    content["resources"] = [os.path.relpath(overlay.resolve(), directory.resolve())]
    content["patches"] = []
    for item in values.objects:
        target = {"kind": item["kind"], "name": plain_name(item)}
        claim = values.existing_claim(item)
        if item["kind"] == "Namespace" or (claim and at(given, claim)):
            gone = {"$patch": "delete", "apiVersion": item["apiVersion"], "kind": item["kind"], "metadata": {"name": "any"}}
            content["patches"].append({"target": target, "patch": blocks(gone)})
        elif steps := list(_steps(item, values, given)):
            content["patches"].append({"target": target, "patch": blocks(steps)})
    return HEADER + blocks(content)


def _steps(item: Object, values: Values, given: Object) -> Iterator[Object]:
    """The JSON patch of an object: the fields that the values change."""
    for place in values.places:
        before, after = place.present, place.filled(given)
        if place.item is not item or before == after:
            continue
        pointer = "".join(f"/{step}" for step in place.path)
        if after is None:
            yield {"op": "remove", "path": pointer}
        else:
            # The path comes last: kustomize trims a patch, and a text that ended it would lose its last line's end.
            yield {"op": "add" if before is None else "replace", "value": after, "path": pointer}
