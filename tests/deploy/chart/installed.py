"""What Helm installs of a chart, and what kustomize renders, as objects that can be compared."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from deploy.helm.chart import ANNOTATION
from deploy.helm.values import plain_name
from tests.deploy.cluster import Object, title, walk


def helm() -> Any:
    """The library is there for these tests alone (requirements/deploy.txt), and pytest reads this file in others, too."""
    return import_module("helm_python")


def installed(chart: Path, namespace: str, values: Object | None = None) -> dict[str, Object]:
    """By title: the objects that `helm install` would send."""
    texts = helm().Chart.load(chart).render(values or {}, name="gspo", namespace=namespace)
    found = [item for path, text in texts.items() if path.endswith(".yaml") for item in yaml.safe_load_all(text) if item]
    return {title(item): item for item in found}


def plain(objects: Sequence[Object]) -> dict[str, Object]:
    """By title: a kustomization's objects as the chart has them: without hashes, Secrets and Namespace."""
    inside = [item for item in objects if item["kind"] not in ("Namespace", "Secret", "PriorityClass")]
    text = json.dumps(inside)
    for item in objects:
        text = text.replace(item["metadata"]["name"], plain_name(item))
    return {title(item): item for item in json.loads(text)}


def without_annotation(items: dict[str, Object]) -> dict[str, Object]:
    """The chart's own annotation, which stands for the hashes, taken out."""
    for _, node in list(walk(items)):
        if isinstance(node, dict) and node.get("annotations", {}).pop(ANNOTATION, None) and not node["annotations"]:
            del node["annotations"]
    return items
