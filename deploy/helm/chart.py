"""A Helm chart of the objects of one run: each is a template in which actions stand where values go."""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

import yaml

from deploy.helm.kustomize import blocks
from deploy.helm.schema import Key, schema_of
from deploy.helm.values import FILES, TEMPLATES, Object, Place, Values, at, namespace_of, plain_name

NAMESPACE: Final = ".Values.namespace | default .Release.Namespace"
ANNOTATION: Final = "gspo/files-sha256"
"""On pods: changed files restart those that read them, as the hashes in ConfigMaps' names do with kustomize."""
IMAGE: Final = """\
{{- define "gspo.image" -}}
{{- $images := .images -}}
{{- with $images.registry }}{{ . }}/{{ end -}}
{{- with .image -}}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $images.tag }}{{ end -}}
{{- end -}}
{{- end }}
"""
HEADER: Final = "# What the overlay has; values.schema.json says what each may be.\n"
OPTIONAL: Final = re.compile(r"^( *)([\w-]+): (gspo-optional-\d+-)$", re.MULTILINE)


def chart_of(objects: list[Object], name: str, version: str) -> dict[str, str]:
    """The chart's files, by path. Secrets are left out, and the Namespace. Raises: ValuesError."""
    values = Values(objects)
    chart = {"apiVersion": "v2", "name": name, "version": version, "appVersion": version, "type": "application"}
    files = {
        "Chart.yaml": yaml.safe_dump(chart, sort_keys=False),
        "values.yaml": HEADER + blocks(values.defaults()),
        "values.schema.json": json.dumps(schema_of(values.kinds), indent=1) + "\n",
        "templates/_image.tpl": IMAGE,
        "templates/NOTES.txt": _notes(objects),
    }
    names = {item["metadata"]["name"]: plain_name(item) for item in objects if item["kind"] in ("ConfigMap", "Secret")}
    for item in objects:
        if item["kind"] not in ("Namespace", "Secret"):
            files[f"templates/{item['kind'].lower()}-{plain_name(item)}.yaml"] = _template(item, values, names)
    return files


def _notes(objects: list[Object]) -> str:
    lines = [
        "The restricted Pod Security Standard, which these pods meet, is a label of the namespace:\n",
        f"  kubectl label namespace {{{{ {NAMESPACE} }}}} pod-security.kubernetes.io/enforce=restricted\n",
        f"Rollouts: kubectl -n {{{{ {NAMESPACE} }}}} scale deployment/rollout --replicas=N",
    ]
    if secrets := [item for item in objects if item["kind"] == "Secret"]:
        lines.append("\nSecrets are not in the chart. Until these are there, pods that need them start again and again:\n")
    for item in secrets:
        given = " ".join(f"--from-file={file}" for part in ("data", "stringData") for file in item.get(part, {}))
        lines.append(f"  kubectl -n {{{{ {NAMESPACE} }}}} create secret generic {plain_name(item)} {given}")
    return "\n".join(lines) + "\n"


def _template(item: Object, values: Values, names: Mapping[str, str]) -> str:
    actions = _Actions()
    copy = actions.literal(deepcopy(item), names, namespace_of(item))
    for place in values.places:
        if place.item is item:
            actions.put(copy, place)
    for way in TEMPLATES:
        if template := at(copy, way):
            mounted = json.dumps(at(item, way))
            keys = [FILES[plain] for hashed, plain in names.items() if f'"{hashed}"' in mounted and plain in FILES]
            files = " ".join(f"(index .Values {json.dumps(key)})" for key in keys)
            annotations = template["metadata"].setdefault("annotations", {})
            annotations[ANNOTATION] = actions.mark(f"list {files} | toJson | sha256sum")
    text = actions.written(yaml.safe_dump(copy, sort_keys=False, width=10_000))
    claim = values.existing_claim(item)
    return f"{{{{- if not ({_value(claim)}) }}}}\n{text}{{{{- end }}}}\n" if claim else text


def _value(key: Key) -> str:
    return f"index .Values {' '.join(json.dumps(step) for step in key)}"


class _Actions:
    """Words that stand in the YAML for a template's actions until it is written: YAML neither quotes nor breaks them."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}

    def mark(self, expression: str, kind: str = "action") -> str:
        """A word for the expression's value, as JSON."""
        word = f"gspo-{kind}-{len(self._made)}-"
        self._made[word] = expression
        return word

    def put(self, copy: Object, place: Place) -> None:
        """The action of a place, into the object's copy."""
        value, kind = _value(place.key), "optional" if place.form == "optional" else "action"
        if place.form == "image":
            value = f'include "gspo.image" (dict "images" .Values.images "image" ({value}))'
        elif place.form == "claim":
            value = f"{value} | default {json.dumps(place.present)}"
        elif place.form == "workers":
            value = f"sub ({value}) 1"
        elif place.form == "namespace":
            value = f"printf {json.dumps('%s'.join(place.around_namespace))} ({NAMESPACE})"
        at(copy, place.path[:-1])[place.path[-1]] = self.mark(value, kind)

    def literal(self, node: Any, names: Mapping[str, str], namespace: str) -> Any:
        """A copy with plain names and the release's namespace, in which braces are text for Helm."""
        if isinstance(node, dict):
            return {
                key: self.mark(NAMESPACE)
                if key == "namespace" and value == namespace
                else self.literal(value, names, namespace)
                for key, value in node.items()
            }
        if isinstance(node, list):
            return [self.literal(value, names, namespace) for value in node]
        if isinstance(node, str):
            return self.mark(json.dumps(node)) if "{{" in node else names.get(node, node)
        return node

    def written(self, text: str) -> str:
        """The YAML with the actions; the line of a field that is left out where its value is empty depends on that."""
        for indent, field, word in OPTIONAL.findall(text):
            value = f"({self._made[word]}) | toJson"
            empty = 'list "null" "\\"\\"" "[]" "{}"'
            text = text.replace(
                f"{indent}{field}: {word}\n",
                f"{{{{- if not (has ({value}) ({empty})) }}}}\n{indent}{field}: {{{{ {value} }}}}\n{{{{- end }}}}\n",
            )
        for word, expression in self._made.items():
            text = text.replace(word, f"{{{{ {expression} | toJson }}}}")
        return text
