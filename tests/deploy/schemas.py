"""Checks objects against the schemas of Kubernetes (strict: no unknown field) and of the custom resources in crds/."""

import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

from tests.deploy.cluster import Cluster, Object, title

KUBERNETES = "1.34"
OLDEST = "1.28"
"""The oldest version that the docs promise."""
CRDS = Path(__file__).with_name("crds")
KEPT = (
    "type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required",
    "uniqueItems", "minProperties", "maxProperties", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip


@cache
def _schema_directory(kubernetes: str) -> Path:
    # Finds the package without importing it: its own validator reads 1.5 MB for each object.
    found = importlib.util.find_spec("kubernetes_validate")
    assert found is not None, "kubernetes-validate is not installed: make test-deploy"
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "kubernetes-json-schema" / f"v{kubernetes}.0-local-strict"


@cache
def _registry(kubernetes: str) -> Registry[Any]:
    definitions = Resource.from_contents(json.loads((_schema_directory(kubernetes) / "_definitions.json").read_text()))
    return definitions @ Registry()


@cache
def _validator(kubernetes: str, api_version: str, kind: str) -> "jsonschema.Draft202012Validator | None":
    group, _, version = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.partition('.')[0]}-{version}.json" if group else f"{kind.lower()}-{version}.json"
    path = _schema_directory(kubernetes) / name
    if path.is_file():
        return jsonschema.Draft202012Validator(json.loads(path.read_text()), registry=_registry(kubernetes))
    schema = _custom_resources().get((api_version, kind))
    return None if schema is None else jsonschema.Draft202012Validator(schema)


@cache
def _custom_resources() -> dict[tuple[str, str], Object]:
    found: dict[tuple[str, str], Object] = {}
    for path in sorted(CRDS.glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {
                "metadata": {"type": "object"},
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
            }
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def strict(node: Object) -> Object:
    """A custom resource's structural schema as a JSON schema that allows no other fields."""
    if node.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    result: Object = {key: value for key, value in node.items() if key in KEPT}
    for key in ("anyOf", "allOf", "oneOf"):
        if key in node:
            result[key] = [{a: b for a, b in part.items() if a in ("required", "not", "pattern")} for part in node[key]]
    if "properties" in node:
        result["properties"] = {key: strict(value) for key, value in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(node["additionalProperties"])
    if "items" in node:
        result["items"] = strict(node["items"])
    return {"anyOf": [result, {"type": "null"}]} if node.get("nullable") else result


def schema(cluster: Cluster) -> Iterator[str]:
    """The API server would accept every object. A kind without a schema is an error."""
    for item in cluster.objects:
        yield from _errors(title(item), item)
        yield from _errors(f"on {OLDEST}: {title(item)}", item, OLDEST)
        if item["kind"] == "LeaderWorkerSet":
            for key in ("leaderTemplate", "workerTemplate"):
                template = item["spec"]["leaderWorkerTemplate"][key]
                wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": key}, "template": template}
                yield from _errors(f"{title(item)}/{key}", wrapped)


def _errors(name: str, item: Object, kubernetes: str = KUBERNETES) -> Iterator[str]:
    validator = _validator(kubernetes, item["apiVersion"], item["kind"])
    if validator is None:
        yield f"{name}: no schema for {item['apiVersion']} {item['kind']}"
        return
    for error in validator.iter_errors(item):
        yield f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"


CHECKS = (schema,)
