"""Writes a Helm chart that installs what a kustomization renders: `python -m deploy.helm.generate OVERLAY CHART`.

    python -m deploy.helm.generate deploy/k8s/overlays/cpu dist/gspo
    helm install gspo dist/gspo --namespace gspo --create-namespace

Values: `images`, by component; `config`, the text of run.toml; `pullSecrets`. The namespace is the release's. What all runs
share (deploy/k8s/cluster) is no part of it. Keys, where the overlay has them, are written into the chart: keep it as secret.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

Object = dict[str, Any]
CONFIG: Final = "run.toml"
CONFIG_MAP: Final = "gspo-run"
TEMPLATES: Final = (
    ("spec", "template"),
    ("spec", "leaderWorkerTemplate", "leaderTemplate"),
    ("spec", "leaderWorkerTemplate", "workerTemplate"),
)
NAMESPACE: Final = "{{ .Release.Namespace }}"
DIGEST: Final = "{{ .Values.config | sha256sum }}"
ANNOTATION: Final = "gspo/config-sha256"
"""On every pod: a changed configuration restarts the pods, as the hash in the ConfigMap's name does with kustomize."""
PULL_SECRETS: Final = "{{ toJson .Values.pullSecrets }}"


class ChartError(RuntimeError):
    """The kustomization has no run to make a chart of. The text says what is missing."""


def rendered(overlay: Path) -> list[Object]:
    """What `kubectl apply -k overlay` would send. Raises: CalledProcessError with kustomize's message."""
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], check=True, capture_output=True, text=True, timeout=120)
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def chart_of(objects: list[Object], name: str, version: str) -> dict[str, str]:
    """The chart's files, by path. Raises: ChartError."""
    configs = [item for item in objects if item["kind"] == "ConfigMap" and CONFIG in item.get("data", {})]
    if len(configs) != 1:
        raise ChartError(f"{len(configs)} ConfigMaps have {CONFIG}: render an overlay with one run")
    config, hashed = configs[0]["data"][CONFIG], configs[0]["metadata"]["name"]
    values: Object = {"config": config, "images": {}, "pullSecrets": []}
    chart = {"apiVersion": "v2", "name": name, "version": version, "appVersion": version, "type": "application"}
    files = {"Chart.yaml": yaml.safe_dump(chart, sort_keys=False)}
    for item in objects:
        if item["kind"] == "Namespace":
            continue  # `helm install --create-namespace` makes it; see NOTES.txt for its label.
        text = _template(_renamed(item, hashed, item["metadata"].get("namespace", "")), values)
        path = f"templates/{item['kind'].lower()}-{item['metadata']['name'].replace(hashed, CONFIG_MAP)}.yaml"
        files[path] = text
    files["values.yaml"] = yaml.safe_dump(values, sort_keys=False, width=120)
    files["templates/NOTES.txt"] = (
        "The restricted Pod Security Standard, which these pods meet, is a label of the namespace:\n\n"
        "  kubectl label namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=restricted\n\n"
        "Rollouts: kubectl -n {{ .Release.Namespace }} scale deployment/rollout --replicas=N\n"
    )
    return files


def _renamed(node: Any, hashed: str, namespace: str) -> Any:
    """A copy in which the ConfigMap has its plain name, and no field names the namespace of the kustomization."""
    if isinstance(node, dict):
        return {
            key: NAMESPACE if key == "namespace" and value == namespace else _renamed(value, hashed, namespace)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_renamed(value, hashed, namespace) for value in node]
    if node == hashed:
        return CONFIG_MAP
    if isinstance(node, str) and namespace and f'namespace="{namespace}"' in node:
        return node.replace(f'namespace="{namespace}"', f'namespace="{NAMESPACE}"')
    return node


def _template(item: Object, values: Object) -> str:
    """The object as a template. What is Helm's own syntax in it is text."""
    if item["kind"] == "ConfigMap" and CONFIG in item.get("data", {}):
        item["data"][CONFIG] = "{{ .Values.config }}"
    for template in _pod_templates(item):
        template["metadata"].setdefault("annotations", {})[ANNOTATION] = DIGEST
        template["spec"]["imagePullSecrets"] = template["spec"].get("imagePullSecrets") or PULL_SECRETS
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            component = template["metadata"]["labels"]["app.kubernetes.io/component"].replace("-worker", "")
            values["images"].setdefault(component, container["image"])
            container["image"] = f'{{{{ index .Values.images "{component}" }}}}'
    marks = _Marks()
    return marks.filled(yaml.safe_dump(marks.marked(item), sort_keys=False, width=10_000))


def _pod_templates(item: Object) -> Iterator[Object]:
    for way in TEMPLATES:
        node: Any = item
        for step in way:
            node = node.get(step, {}) if isinstance(node, dict) else {}
        if node:
            yield node


class _Marks:
    """Words that stand in the YAML for a template's actions until it is written: YAML neither quotes nor breaks them."""

    def __init__(self) -> None:
        self._actions: list[str] = []

    def put(self, action: str) -> str:
        self._actions.append(action)
        return f"gspo-action-{len(self._actions) - 1}-"

    def filled(self, text: str) -> str:
        for number, action in enumerate(self._actions):
            text = text.replace(f"gspo-action-{number}-", action)
        return text

    def marked(self, node: Any) -> Any:
        """A copy in which our actions are marks, and braces that are not ours are text for Helm."""
        if isinstance(node, dict):
            return {key: self.marked(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self.marked(value) for value in node]
        if not isinstance(node, str) or "{{" not in node:
            return node
        if node == PULL_SECRETS:
            return self.put(PULL_SECRETS)
        if node in (NAMESPACE, DIGEST) or node.startswith(("{{ index .Values.images", "{{ .Values.config")):
            return self.put(node.replace(" }}", " | toJson }}"))
        if NAMESPACE in node:
            before, _, after = node.partition(NAMESPACE)
            return self.put("{{ printf " + json.dumps(f"{before}%s{after}") + " .Release.Namespace | toJson }}")
        return self.put("{{ " + json.dumps(node) + " | toJson }}")


def write_chart(files: dict[str, str], chart: Path) -> None:
    """Write the files below ``chart``."""
    for path, text in files.items():
        (chart / path).parent.mkdir(parents=True, exist_ok=True)
        (chart / path).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.helm.generate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overlay", type=Path, help="a kustomization, such as deploy/k8s/overlays/cpu")
    parser.add_argument("chart", type=Path, help="the folder to write the chart to; its name is the chart's")
    parser.add_argument("--version", default="0.1.0", help="of the chart (default: %(default)s)")
    arguments = parser.parse_args()
    write_chart(chart_of(rendered(arguments.overlay), arguments.chart.name, arguments.version), arguments.chart)


if __name__ == "__main__":
    main()
