"""The values of a run: which fields of which objects each one fills, and what an overlay has there."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from deploy.helm.schema import Key

Object = dict[str, Any]
Path = tuple[str | int, ...]
CONFIG: Final = "run.toml"
TEMPLATES: Final[tuple[Path, ...]] = (
    ("spec", "template"),
    ("spec", "leaderWorkerTemplate", "leaderTemplate"),
    ("spec", "leaderWorkerTemplate", "workerTemplate"),
)
FILES: Final = {"gspo-run": "config", "gspo-code": "code", "gspo-data": "data"}
HASHED: Final = re.compile(r"(.+)-[2456789bcdfghkmt]{10}")
"""A name to which kustomize has added the hash of the content."""
EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
ORDER: Final = (
    "namespace", "images", "imagePullSecrets", "priorityClasses", "storage", "broker", "rollout", "learner", "learnerWorker",
    "modelDownload", "tools",
)  # fmt: skip


class ValuesError(RuntimeError):
    """No chart or overlay can be made. The text says of what, and what to do."""


@dataclass(frozen=True)
class Place:
    """A field that a value fills: as it is, or not at all where the value is empty, or as the form says."""

    item: Object
    path: Path
    key: Key
    form: Literal["value", "optional", "image", "claim", "workers", "namespace"] = "value"

    @property
    def present(self) -> Any:
        """What the overlay has; None where the field is not there."""
        return at(self.item, self.path)

    @property
    def around_namespace(self) -> tuple[str, str]:
        """What is before and behind the namespace in a query."""
        before, _, after = self.present.partition(f'"{namespace_of(self.item)}"')
        return f'{before}"', f'"{after}'

    def filled(self, values: Object) -> Any:
        """What these values put there; None leaves the field out."""
        value = at(values, self.key)
        if self.form == "image":
            images = values["images"]
            name = f"{images['registry']}/{value['repository']}".removeprefix("/")
            return f"{name}@{value['digest']}" if value.get("digest") else f"{name}:{value.get('tag') or images['tag']}"
        if self.form == "claim":
            return value or self.present
        if self.form == "workers":
            return value - 1
        if self.form == "namespace":
            return value.join(self.around_namespace) if value else self.present
        return None if self.form == "optional" and value in EMPTY else value


def at(node: Any, path: Sequence[str | int]) -> Any:
    """What is below ``node`` at ``path``; None where something of it is missing."""
    for step in path:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def namespace_of(item: Object) -> str:
    """The namespace that the overlay gives the object."""
    return str(item["metadata"].get("namespace", ""))


def plain_name(item: Object) -> str:
    """The object's name, without kustomize's hash."""
    name = str(item["metadata"]["name"])
    found = HASHED.fullmatch(name) if item["kind"] in ("ConfigMap", "Secret") else None
    return found[1] if found else name


def camel(name: str) -> str:
    """``learner-run`` as a key of values: ``learnerRun``."""
    first, *rest = re.split("[^A-Za-z0-9]+", name)
    return first + "".join(word.capitalize() for word in rest)


class Values:
    """The places of a set of rendered objects, and by key their kinds and the overlay's own values. Raises: ValuesError."""

    def __init__(self, objects: Sequence[Object]) -> None:
        configs = [item for item in objects if item["kind"] == "ConfigMap" and CONFIG in item.get("data", {})]
        if len(configs) != 1:
            raise ValuesError(f"{len(configs)} ConfigMaps have {CONFIG}: render an overlay with one run")
        self.objects = list(objects)
        self.places: list[Place] = []
        self.kinds: dict[Key, str] = {}
        self._defaults: dict[Key, Any] = {}
        self._claims = {item["metadata"]["name"] for item in objects if item["kind"] == "PersistentVolumeClaim"}
        self._scaled = {at(item, ("spec", "scaleTargetRef", "name")) for item in objects}
        self._field(("namespace",), "namespace", "")
        self._images([container["image"] for item in objects for container in _containers(item)])
        for item in objects:
            self._object(item)

    def defaults(self) -> Object:
        """The overlay's own values."""
        found: Object = {}
        for key in sorted(self._defaults, key=_place_in_file):
            node = found
            for step in key[:-1]:
                node = node.setdefault(step, {})
            node[key[-1]] = self._defaults[key]
        return found

    def existing_claim(self, item: Object) -> Key | None:
        """The value that, where it is not empty, leaves this claim out."""
        key = ("storage", camel(item["metadata"]["name"]), "existingClaim")
        return key if item["kind"] == "PersistentVolumeClaim" and key in self.kinds else None

    def _field(self, key: Key, kind: str, default: Any) -> None:
        if self._defaults.setdefault(key, default) != default:
            raise ValuesError(
                f"{'.'.join(key)} is {self._defaults[key]!r} in one object and {default!r} in another: make them equal in "
                "the overlay"
            )
        self.kinds[key] = kind

    def _put(self, item: Object, path: Path, key: Key, kind: str, otherwise: Any = None, *, form: str = "value") -> None:
        place = Place(item, path, key, form)  # type: ignore[arg-type]
        self._field(key, kind, otherwise if place.present is None else place.present)
        self.places.append(place)

    def _images(self, references: list[str]) -> None:
        parts = {reference: _parts(reference) for reference in references}
        registries = {registry for registry, *_ in parts.values()}
        registry = registries.pop() if len(registries) == 1 else ""
        tag = Counter(tag for _, _, tag, _ in parts.values() if tag).most_common(1)
        usual = tag[0][0] if tag else "latest"
        self._field(("images", "registry"), "registry", registry)
        self._field(("images", "tag"), "tag", usual)
        for own, name, version, digest in parts.values():
            key = ("images", _image_key(name))
            self._field((*key, "repository"), "repository", f"{own}/{name}" if own and not registry else name)
            self._field((*key, "tag"), "own tag", "" if version in (usual, "") else version)
            self._field((*key, "digest"), "digest", digest)

    def _object(self, item: Object) -> None:
        kind, name = item["kind"], plain_name(item)
        for path in TEMPLATES:
            if at(item, path):
                self._template(item, path)
        if kind == "Deployment" and name not in self._scaled:
            wanted = "unset replicas" if at(item, ("spec", "replicas")) is None else "replicas"
            self._put(item, ("spec", "replicas"), (camel(name), "replicas"), wanted, form="optional")
        elif kind == "StatefulSet" and name == "learner-worker":
            self._field(("learner", "nodes"), "nodes", item["spec"]["replicas"] + 1)
            self.places.append(Place(item, ("spec", "replicas"), ("learner", "nodes"), "workers"))
        elif kind == "LeaderWorkerSet":
            self._put(item, ("spec", "leaderWorkerTemplate", "size"), ("learner", "nodes"), "nodes")
        elif kind == "PersistentVolumeClaim":
            self._claim(item, (), name)
        elif kind == "ConfigMap" and name in FILES:
            one = ("data", CONFIG) if FILES[name] == "config" else ("data",)
            self._put(item, one, (FILES[name],), "config" if FILES[name] == "config" else "files", {})
        for index, claim in enumerate(at(item, ("spec", "volumeClaimTemplates")) or []):
            self._claim(item, ("spec", "volumeClaimTemplates", index), claim["metadata"]["name"])
        for index, trigger in enumerate(at(item, ("spec", "triggers")) or []):
            if f'namespace="{namespace_of(item)}"' in str(at(trigger, ("metadata", "query"))):
                path = ("spec", "triggers", index, "metadata", "query")
                self.places.append(Place(item, path, ("namespace",), "namespace"))

    def _claim(self, item: Object, way: Path, name: str) -> None:
        key, spec = ("storage", camel(name)), (*way, "spec")
        self._put(item, (*spec, "resources", "requests", "storage"), (*key, "size"), "size")
        self._put(item, (*spec, "storageClassName"), (*key, "storageClassName"), "class", "", form="optional")
        self._put(item, (*spec, "accessModes"), (*key, "accessModes"), "modes")

    def _template(self, item: Object, way: Path) -> None:
        role = camel(at(item, (*way, "metadata", "labels", "app.kubernetes.io/component")) or item["metadata"]["name"])
        spec = (*way, "spec")
        for part in ("initContainers", "containers"):
            for index, container in enumerate(at(item, (*spec, part)) or []):
                key = ("images", _image_key(_parts(container["image"])[1]))
                self.places.append(Place(item, (*spec, part, index, "image"), key, "image"))
                for number, entry in enumerate(container.get("env", [])):
                    if role == "modelDownload" and entry["name"] in ("MODEL", "DATASET"):
                        path = (*spec, part, index, "env", number, "value")
                        self._put(item, path, (role, entry["name"].lower()), "hub name")
        self._put(item, (*spec, "imagePullSecrets"), ("imagePullSecrets",), "pull secrets", [], form="optional")
        main = (*spec, "initContainers" if role == "modelDownload" else "containers", 0)
        self._put(item, (*main, "resources"), (role, "resources"), "resources", {})
        self._put(item, (*spec, "nodeSelector"), (role, "nodeSelector"), "selector", {}, form="optional")
        self._put(item, (*spec, "tolerations"), (role, "tolerations"), "tolerations", [], form="optional")
        if name := at(item, (*spec, "priorityClassName")):
            key = ("priorityClasses", camel(name.removeprefix("gspo-")))
            self._put(item, (*spec, "priorityClassName"), key, "priority", form="optional")
        for index, volume in enumerate(at(item, (*spec, "volumes")) or []):
            if volume["name"] == "shm" and at(volume, ("emptyDir", "sizeLimit")):
                self._put(item, (*spec, "volumes", index, "emptyDir", "sizeLimit"), (role, "sharedMemory"), "size")
            if (claim := at(volume, ("persistentVolumeClaim", "claimName"))) and not re.fullmatch(r"run-broker-\d+", claim):
                key = ("storage", camel(claim), "existingClaim")
                self._field(key, "claim", "" if claim in self._claims else claim)
                path = (*spec, "volumes", index, "persistentVolumeClaim", "claimName")
                self.places.append(Place(item, path, key, "claim"))


def _place_in_file(key: Key) -> int:
    """Files come last, because they are long."""
    return ORDER.index(key[0]) if key[0] in ORDER else len(ORDER) + (key[0] in FILES.values())


def _containers(item: Object) -> Iterator[Object]:
    for path in TEMPLATES:
        for part in ("initContainers", "containers"):
            yield from at(item, (*path, "spec", part)) or []


def _parts(reference: str) -> tuple[str, str, str, str]:
    """Registry, name, tag and digest of an image."""
    whole, _, digest = reference.partition("@")
    registry, _, last = whole.rpartition("/")
    name, _, tag = last.partition(":")
    return registry, name, tag, digest


def _image_key(name: str) -> str:
    return camel(name.removeprefix("gspo-"))


def merged(defaults: Object, given: Object) -> Object:
    """``given`` over ``defaults`` as Helm does it: maps are merged, all else is replaced, and null removes a default."""
    found = dict(defaults)
    for key, value in given.items():
        if value is None and key in found:
            del found[key]
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merged(found[key], value)
        else:
            found[key] = value
    return found
