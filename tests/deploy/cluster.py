"""The objects of one rendered overlay, and how they refer to each other."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from gspo_services.shared.settings.configuration import load_settings
from gspo_services.shared.settings.sections import Settings

Object = dict[str, Any]
K8S = Path(__file__).parents[2] / "deploy" / "k8s"
CONFIG = "run.toml"
WORKLOADS = ("Deployment", "StatefulSet", "Job", "LeaderWorkerSet")
VARIABLE = re.compile(r"\$\((\w+)\)")
POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


def render(directory: Path) -> list[Object]:
    """What ``kubectl apply -k directory`` would send. Raises: CalledProcessError with kustomize's message in stderr."""
    out = subprocess.run(["kubectl", "kustomize", str(directory)], check=True, capture_output=True, text=True, timeout=120)
    return [document for document in yaml.safe_load_all(out.stdout) if document]


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector (or a Service's plain one) selects these labels. An empty selector selects everything."""
    selector = selector or {}
    plain = selector if not {"matchLabels", "matchExpressions"} & set(selector) else selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in plain.items()):
        return False
    for expression in selector.get("matchExpressions", []):
        if expression["operator"] != "In":
            raise ValueError(f"operator {expression['operator']}: the checks support only In")
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


@dataclass(frozen=True)
class Pods:
    """The pods that one template makes."""

    owner: Object
    template: Object

    @property
    def kind(self) -> str:
        return str(self.owner["kind"])

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.owner['metadata']['name']}/{self.role}"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def role(self) -> str:
        """The component: broker, rollout, learner, learner-worker or model-download."""
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def spec(self) -> Object:
        return dict(self.template["spec"])

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> Object:
        return dict(self.spec["containers"][0])

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.main.get("ports", []) if "name" in port}

    @property
    def environment(self) -> dict[str, str | None]:
        """Environment of the main container; None where only the cluster knows the value."""
        return {entry["name"]: entry.get("value") for entry in self.main.get("env", [])}

    @property
    def indices(self) -> list[int]:
        """The numbers of the pods that the template makes; [0] where they have none."""
        spec = self.owner["spec"]
        if self.kind == "LeaderWorkerSet":
            return [0] if self.role == "learner" else list(range(1, spec["leaderWorkerTemplate"]["size"]))
        start = spec.get("ordinals", {}).get("start", 0) if self.kind == "StatefulSet" else 0
        return list(range(start, start + (spec["replicas"] if self.kind == "StatefulSet" else 1)))

    def overrides(self, index: int) -> list[str]:
        """The values of the main container's --set arguments in the pod with this number."""
        numbered = {"LWS_WORKER_INDEX"} if self.kind == "LeaderWorkerSet" else set()
        for entry in self.main.get("env", []):
            if entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == POD_INDEX:
                numbered.add(entry["name"])
        given = [word for option, word in pairwise(self.main.get("args", [])) if option == "--set"]
        return [VARIABLE.sub(lambda found: str(index) if found[1] in numbered else found[0], word) for word in given]

    def volume(self, name: str) -> Object:
        """The volume, or the claim of a StatefulSet's template."""
        for volume in self.spec.get("volumes", []):
            if volume["name"] == name:
                return dict(volume)
        for claim in self.owner["spec"].get("volumeClaimTemplates", []):
            if claim["metadata"]["name"] == name:
                return {"name": name, "volumeClaimTemplate": claim}
        return {}

    def mount(self, path: str, container: Object | None = None) -> Object:
        """The volume that holds ``path`` in the container (default: the main one); empty where none does."""
        mounts = (container or self.main).get("volumeMounts", [])
        holding = [m for m in mounts if path == m["mountPath"] or path.startswith(m["mountPath"].rstrip("/") + "/")]
        return self.volume(max(holding, key=lambda m: len(m["mountPath"]))["name"]) if holding else {}


class Cluster:
    """All objects of one overlay. They are plain data: a test may change them before it checks them."""

    def __init__(self, objects: Sequence[Object]) -> None:
        self.objects = list(objects)

    def of_kind(self, *kinds: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        return next((item for item in self.of_kind(kind) if item["metadata"]["name"] == name), None)

    def one(self, kind: str, name: str) -> Object:
        item = self.find(kind, name)
        assert item is not None, f"no {kind}/{name}"
        return item

    @property
    def pods(self) -> list[Pods]:
        found: list[Pods] = []
        for owner in self.of_kind(*WORKLOADS):
            if owner["kind"] == "LeaderWorkerSet":
                template = owner["spec"]["leaderWorkerTemplate"]
                found += [Pods(owner, template[key]) for key in ("leaderTemplate", "workerTemplate") if key in template]
            else:
                found.append(Pods(owner, owner["spec"]["template"]))
        return found

    def role(self, role: str) -> Pods:
        return next(pods for pods in self.pods if pods.role == role)

    def selected(self, selector: Mapping[str, Any] | None) -> list[Pods]:
        return [pods for pods in self.pods if matches(selector, pods.labels)]

    @property
    def config(self) -> str:
        """The run's TOML text."""
        return next(str(item["data"][CONFIG]) for item in self.of_kind("ConfigMap") if CONFIG in item.get("data", {}))

    def settings(self, pods: Pods | None = None, index: int | None = None) -> Settings:
        """The settings that a process of ``pods`` reads from the file, its environment and arguments, in the first pod or
        in pod number ``index``. Raises: ConfigurationError.
        """
        environment = {key: value for key, value in (pods.environment if pods else {}).items() if value is not None}
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / CONFIG
            path.write_text(self.config, encoding="utf-8")
            overrides = pods.overrides(pods.indices[0] if index is None else index) if pods else []
            return load_settings(path, overrides, environment=environment)


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below ``node`` with its path, depth first."""
    yield path, node
    children: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(node, dict):
        children = iter(node.items())
    elif isinstance(node, list):
        children = iter(enumerate(node))
    for key, value in children:
        yield from walk(value, f"{path}/{key}")


def title(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


def copy_of(objects: Sequence[Object]) -> list[Object]:
    return list(json.loads(json.dumps(objects)))


Check = Callable[[Cluster], Iterator[str]]
"""Yields what is wrong, one sentence each."""

QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: object) -> float:
    """Kubernetes's "500m" or "2Gi" as a number. Raises: ValueError."""
    match = QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    return float(match[1]) * UNITS.get(match[2] or "", 1.0)
