"""Fields, types and versions of objects, by Kubernetes' own schemas (the package kubernetes-validate) and those of CRDs."""

import importlib.util
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gspo_services.prepare.cluster_check.model import ClusterFault, ClusterModel, Object, Way, at, items_at

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from referencing import Registry

OLDEST: Final = "1.28"
"""The oldest Kubernetes that the guide promises."""
KEPT: Final = (
    "type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required",
    "uniqueItems", "minProperties", "maxProperties", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
OF_THE_CLUSTER: Final = ("Node", "CustomResourceDefinition")
"""Kinds that are put beside the manifests and not applied."""
MOST_CHARACTERS: Final = 200


def missing() -> str:
    """How to get the schemas; empty where they are installed."""
    return "" if _directory() else "fields and their types were not checked: pip install kubernetes-validate"


def fields(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """The API server takes every object; nothing is found where :func:`missing` says why."""
    if _directory() is None:
        return
    newest = max(_versions(), key=lambda version: int(version.partition(".")[2]))
    resources = _custom_resources(cluster)
    for item in cluster.objects:
        if item.get("kind") in OF_THE_CLUSTER:
            continue
        found = list(_errors(item, newest, resources))
        yield from found
        if not found and OLDEST in _versions():
            for fault in _errors(item, OLDEST, resources):
                text = f"{fault.text} (Kubernetes {OLDEST}; {newest} takes it)"
                yield ClusterFault(item=item, way=fault.way, text=text, way_out=fault.way_out, status="warn")


def _errors(item: Object, version: str, resources: dict[tuple[str, str], Object]) -> Iterator[ClusterFault]:
    kind, api = str(item.get("kind")), str(item.get("apiVersion"))
    if _is_built_in(api):
        validator = _validator(version, api, kind)
        if validator is None:
            text = f"Kubernetes {version} serves no {kind} as {api}"
            yield ClusterFault(item=item, way=("apiVersion",), text=text, way_out="`kubectl api-resources` lists both")
            return
        yield from _faults(item, item, validator, ())
        return
    if (schema := resources.get((api, kind))) is not None:
        from jsonschema import Draft202012Validator

        yield from _faults(item, item, Draft202012Validator(schema), ())
    for way in (("leaderTemplate",), ("workerTemplate",)) if kind == "LeaderWorkerSet" else ():
        whole = ("spec", "leaderWorkerTemplate", *way)
        validator = _validator(version, "v1", "PodTemplate")
        if validator is not None and (template := at(item, *whole)):
            named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "template"}, "template": template}
            yield from _faults(item, named, validator, whole)


def _faults(item: Object, given: Object, validator: "Draft202012Validator", before: Way) -> Iterator[ClusterFault]:
    for error in validator.iter_errors(given):
        inner = tuple(error.absolute_path)
        yield ClusterFault(
            item=item, way=(*before, *inner[1 if before else 0 :]), text=error.message[:MOST_CHARACTERS],
            way_out="correct it: `kubectl explain KIND.FIELD` lists what there is",
        )  # fmt: skip


def _is_built_in(api_version: str) -> bool:
    """Whether its group is one of Kubernetes itself, and not of a CRD."""
    group = api_version.rpartition("/")[0]
    return "." not in group or (group.endswith(".k8s.io") and ".x-k8s.io" not in f".{group}")


@lru_cache
def _directory() -> Path | None:
    # Finds the package without importing it: its own validator reads 1.5 MB for each object.
    found = importlib.util.find_spec("kubernetes_validate")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "kubernetes-json-schema"


@lru_cache
def _versions() -> tuple[str, ...]:
    """The versions of Kubernetes whose schemas are there, such as 1.34."""
    directory = _directory()
    names = [] if directory is None else [path.name for path in directory.glob("v*.0-local-strict")]
    return tuple(name.removeprefix("v").removesuffix(".0-local-strict") for name in names)


@lru_cache
def _registry(version: str) -> "Registry[Any]":
    from referencing import Registry, Resource

    return Resource.from_contents(_read(version, "_definitions.json")) @ Registry()


def _read(version: str, name: str) -> Any:
    directory = _directory()
    assert directory is not None
    return json.loads((directory / f"v{version}.0-local-strict" / name).read_text(encoding="utf-8"))


@lru_cache
def _validator(version: str, api_version: str, kind: str) -> "Draft202012Validator | None":
    from jsonschema import Draft202012Validator

    group, _, served = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.partition('.')[0]}-{served}.json" if group else f"{kind.lower()}-{served}.json"
    try:
        return Draft202012Validator(_read(version, name), registry=_registry(version))
    except OSError:
        return None


def _custom_resources(cluster: ClusterModel) -> dict[tuple[str, str], Object]:
    """By version and kind: the schemas of the CRDs in the set."""
    found: dict[tuple[str, str], Object] = {}
    for definition in cluster.of_kind("CustomResourceDefinition"):
        spec = at(definition, "spec")
        for served in items_at(spec, "versions"):
            schema = strict(at(served, "schema", "openAPIV3Schema"))
            known = {"metadata": {"type": "object"}, "apiVersion": {"type": "string"}, "kind": {"type": "string"}}
            schema["properties"] = {**schema.get("properties", {}), **known}
            found[f"{at(spec, 'group')}/{at(served, 'name')}", str(at(spec, "names", "kind"))] = schema
    return found


def strict(node: Object) -> Object:
    """A CRD's structural schema as a JSON schema that allows no other fields."""
    if node.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    result: Object = {key: value for key, value in node.items() if key in KEPT}
    for key in ("anyOf", "allOf", "oneOf"):
        if key in node:
            result[key] = [{a: b for a, b in part.items() if a in ("required", "not", "pattern")} for part in node[key]]
    if "properties" in node:
        result["properties"] = {key: strict(value) for key, value in node["properties"].items()}
        result["additionalProperties"] = bool(node.get("x-kubernetes-preserve-unknown-fields"))
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(node["additionalProperties"])
    if "items" in node:
        result["items"] = strict(node["items"])
    return {"anyOf": [result, {"type": "null"}]} if node.get("nullable") else result
