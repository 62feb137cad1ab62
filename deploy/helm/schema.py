"""What each value may be, as JSON schemas (draft 7) that Helm checks and :func:`problems` checks in its place."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError

Schema = dict[str, Any]
Key = tuple[str, ...]
MOST_CHARACTERS: Final = 80
"""Of a value in a message."""


def _text(pattern: str, description: str, **more: Any) -> Schema:
    return {"type": "string", "pattern": f"^({pattern})$", "description": description, **more}


def _object(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


LABEL: Final = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
NAME: Final = "[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
QUANTITY: Final = {
    "type": ["string", "number"], "minimum": 0, "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$",
    "description": "a number with m, k, M, G, T, Ki, Mi, Gi, Ti or nothing behind it: 500m, 2 or 2Gi",
}  # fmt: skip
TOLERATION: Final = _object({
    "key": {"type": "string"}, "operator": {"enum": ["Exists", "Equal"]}, "value": {"type": "string"},
    "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]}, "tolerationSeconds": {"type": "integer"},
})  # fmt: skip
COUNT: Final = {"type": "integer", "minimum": 0}
FILE: Final = {
    "type": "string",
    "maxLength": 1 << 20,
    "description": "a text of 1 MiB at most, which is what a ConfigMap holds",
}
KINDS: Final[dict[str, Schema]] = {
    "namespace": _text(f"{LABEL}|", "small letters, digits and dashes, 63 at most; empty: the release's, or the overlay's"),
    "registry": _text(r"[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*|", "host, port and path, without a scheme"),
    "repository": _text("[a-z0-9._-]+(:[0-9]+)?(/[a-z0-9._-]+)*", "the image's name, without tag and digest"),
    "tag": _text("[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "a string such as 0.1.0; with quotes where it could be a number"),
    "own tag": _text("([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?", "a string; empty: images.tag"),
    "digest": _text("(sha256:[0-9a-f]{64})?", "sha256: and 64 hexadecimal digits, in place of the tag; or empty"),
    "pull secrets": {
        "type": "array", "items": _object({"name": _text(NAME, "the name of a Secret")}, required=["name"]),
        "description": "a list such as [{name: registry}]",
    },
    "priority": _text(f"{NAME}|", "the name of a PriorityClass; empty: none"),
    "size": QUANTITY,
    "class": _text(f"{NAME}|", "the name of a StorageClass; empty: the cluster's default"),
    "modes": {
        "type": "array", "minItems": 1, "uniqueItems": True,
        "items": {"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"]},
    },
    "claim": _text(f"{NAME}|", "the name of a claim that is there already; empty: one is made"),
    "resources": _object(
        {part: {"type": "object", "additionalProperties": QUANTITY} for part in ("requests", "limits")},
        description="requests and limits of the role's container, GPUs (nvidia.com/gpu) in both",
    ),
    "selector": {
        "type": "object", "additionalProperties": {"type": "string", "description": "a string: quote true and numbers"},
        "description": "labels of nodes",
    },
    "tolerations": {"type": "array", "items": TOLERATION, "description": "a list; it replaces the overlay's"},
    "replicas": COUNT | {"description": "a whole number, 0 or more"},
    "unset replicas": COUNT | {"type": ["integer", "null"], "description": "a whole number; null: `kubectl scale` says it"},
    "nodes": COUNT | {"minimum": 2, "description": "a whole number, 2 or more: learner.num_nodes of the configuration"},
    "hub name": _text(r"[\w.-]+/[\w.-]+|", "OWNER/NAME on Hugging Face, or empty"),
    "files": {
        "type": "object", "additionalProperties": FILE,
        "propertyNames": _text("[A-Za-z0-9_-][A-Za-z0-9._-]*", "the name of a file: letters, digits, dots, - and _"),
        "description": "texts by file name",
    },
    "config": FILE | {"minLength": 1, "description": "the text of run.toml, of 1 MiB at most"},
}  # fmt: skip
UNSET: Final = frozenset({
    "namespace", "own tag", "digest", "unset replicas", "selector", "tolerations", "pull secrets", "class", "priority",
    "claim",
})  # fmt: skip
"""Kinds that null may remove."""


def schema_of(kinds: Mapping[Key, str]) -> Schema:
    """The schema of a values file that has these keys, and no others. ``global`` is Helm's, for charts inside charts."""
    root = _object({"global": {"type": "object"}}, required=[])
    root["$schema"] = "http://json-schema.org/draft-07/schema#"
    for key, kind in kinds.items():
        node = root
        for step in key[:-1]:
            if step not in node["required"]:
                node["required"].append(step)
            node = node["properties"].setdefault(step, _object({}, required=[]))
        node["properties"][key[-1]] = KINDS[kind]
        node["required"] += [] if kind in UNSET else [key[-1]]
    return root


def problems(values: Any, schema: Schema) -> list[str]:
    """What is wrong with a values file: key, value, and what is allowed, one sentence each."""
    found = sorted(
        Draft7Validator(schema).iter_errors(values), key=lambda error: [str(step) for step in error.absolute_path]
    )
    return [text for error in found for text in _sentences(error)]


def _sentences(error: ValidationError) -> Iterator[str]:
    at = ".".join(str(step) for step in error.absolute_path)
    before = f"{at}." if at else ""
    if error.validator == "additionalProperties":
        there = error.schema["properties"]
        for key in error.instance.keys() - there.keys():
            yield f"{before}{key}: there is no such value; there are {', '.join(sorted(there.keys() - {'global'}))}"
    elif error.validator == "required":
        for key in error.validator_value:
            if key not in error.instance:
                yield f"{before}{key}: it has no value, and null removes the default: write one"
    else:
        given, allowed = repr(error.instance), error.schema.get("description", "")
        given = given if len(given) <= MOST_CHARACTERS else f"{given[:MOST_CHARACTERS]}... ({len(given)} characters)"
        shown = "" if error.validator == "maxLength" else f" ({error.message})" if not allowed else ""
        yield f"{at or 'the file'} is {given}: write {allowed or 'what is allowed'}{shown}"
