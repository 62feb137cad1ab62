"""Reads rendered manifests, and remembers the line of each field."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gspo_services.prepare.cluster_check.model.manifests import ClusterModel, ManifestObject
from gspo_services.prepare.cluster_check.model.objects import Way
from gspo_services.shared.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import yaml

SUFFIXES: Final = (".yaml", ".yml", ".json")
MAX_BYTES: Final = 64 << 20


def read_manifests(path: Path) -> ClusterModel:
    """The objects in a file, or in all files of a folder. Raises: ConfigurationError with file, line and way out."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigurationError("PyYAML is not installed here, which reads manifests: pip install pyyaml") from error
    manifests: list[ManifestObject] = []
    for file in _files(path):
        shown = str(file.relative_to(path)) if path.is_dir() else str(file)
        try:
            for root in yaml.compose_all(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
                manifests += _manifests(root, shown)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{file}: is not YAML: {error}; render the manifests again") from error
    if not manifests:
        raise ConfigurationError(f"{path}: holds no Kubernetes object; `kubectl kustomize OVERLAY > {path / 'all.yaml'}`")
    return ClusterModel(manifests)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.is_file():
            raise ConfigurationError(f"{path}: there is no such file or folder; write rendered manifests there")
        return [path]
    if (path / "kustomization.yaml").is_file():
        raise ConfigurationError(
            f"{path}: holds a kustomization, which must be rendered first: "
            f"mkdir rendered && kubectl kustomize {path} > rendered/all.yaml, then gspo check --kubernetes rendered"
        )
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if sum(file.stat().st_size for file in found) > MAX_BYTES:
        raise ConfigurationError(f"{path}: holds more than {MAX_BYTES >> 20} MiB of manifests; name a folder with one run's")
    return found


def _manifests(root: "yaml.Node | None", file: str) -> Iterator[ManifestObject]:
    import yaml

    if root is None:
        return
    item = _plain(root)
    if item is None:
        return
    where = f"{file}:{root.start_mark.line + 1}"
    if not isinstance(item, dict) or "kind" not in item or "apiVersion" not in item:
        raise ConfigurationError(f"{where}: is no Kubernetes object: it has no apiVersion and kind; move it elsewhere")
    if str(item["kind"]).endswith("List") and isinstance(item.get("items"), list):
        (nodes,) = (value for key, value in root.value if key.value == "items")
        assert isinstance(nodes, yaml.SequenceNode)
        for node in nodes.value:
            yield from _manifests(node, file)
        return
    yield ManifestObject(item, file, dict(_lines(root, ())))


def _plain(node: "yaml.Node") -> Any:
    import yaml

    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _lines(node: "yaml.Node", way: Way) -> Iterator[tuple[Way, int]]:
    import yaml

    yield way, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*way, str(key.value))
            yield from _lines(value, inner)
            yield inner, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*way, index))
