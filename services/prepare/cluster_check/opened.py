"""Compares what each process says that it opens with what its pods mount."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    ContainerSpec,
    Object,
    Way,
    at,
    is_ours,
    items_at,
    process_container,
    process_of,
    settings_of,
)
from gspo_services.shared.settings import OpenedPath, named_code, opened_paths

CLAIMS: Final = {"persistentVolumeClaim", "volumeClaimTemplate"}
FILES: Final = {"configMap", "secret", "projected", "downwardAPI"}
"""Volumes whose files come from objects of the cluster; nobody can write to them."""
EVERYBODY: Final = 0o007


def paths(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """All that a process opens is mounted; what it writes can be written, and lasts where it must."""
    for pods in cluster.pods:
        settings, container = settings_of(cluster, pods), process_container(pods)
        process = "" if container is None else process_of(container)
        if settings is not None and container is not None and process:
            for opened in opened_paths(settings, process):
                yield from _of(cluster, container, opened)
        for other in pods.containers:
            if other != container and is_ours(other):
                yield from _of(cluster, other, OpenedPath(setting="", path="/tmp", writes=True))


def code(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """The user's modules are in the working directory of the processes that import them, as far as its files are known."""
    for pods in cluster.pods:
        settings, container = settings_of(cluster, pods), process_container(pods)
        if settings is None or container is None or not (process := process_of(container)):
            continue
        found = container.mount(str(container.data.get("workingDir", "/")))
        volume = container.pods.volume(str(found[1].get("name"))) if found else None
        name = str(at(volume[1], "configMap", "name") or "") if volume else ""
        item = cluster.find("ConfigMap", name, pods.namespace) if name else None
        files = {str(file) for part in ("data", "binaryData") for file in at(item, part)} if item else set()
        for setting, module in named_code(settings, process):
            file = f"{module.partition('.')[0]}.py"
            if item is not None and file not in files:
                text = f"{setting} is in {module}, and ConfigMap {name} has no {file}: it has {', '.join(sorted(files))}"
                yield ClusterFault(item=item, way=("data",), text=text, way_out=f"add {file} to the files of {name}")
            elif found is None:
                text = f"{setting} is in {module}, and no volume is mounted at the working directory: its image must have it"
                way_out = "add components/code with the ConfigMap gspo-code, or build it into the image"
                yield ClusterFault(item=pods.owner, way=container.way, text=text, way_out=way_out, status="warn")


def _of(cluster: ClusterModel, container: ContainerSpec, opened: OpenedPath) -> Iterator[ClusterFault]:
    item, mounts = container.pods.owner, (*container.way, "volumeMounts")
    found = container.mount(opened.path)
    volume = container.pods.volume(str(found[1].get("name"))) if found else None
    if found is None or volume is None:
        if problem := _unmounted(container, opened):
            yield ClusterFault(item=item, way=mounts, text=problem[0], way_out=problem[1])
        return
    index, mount = found
    if opened.writes and (
        mount.get("readOnly") or at(volume[1], "persistentVolumeClaim", "readOnly") is True or FILES & set(volume[1])
    ):
        text = f"{_name(opened)} is mounted read-only: {_program(container)} cannot write there"
        yield ClusterFault(item=item, way=(*mounts, index), text=text, way_out="remove readOnly, or mount another volume")
    if opened.lasts and not CLAIMS & set(volume[1]):
        text = f"{_name(opened)} is on no claim: what {_program(container)} has written ends with its pod"
        yield ClusterFault(item=item, way=(*mounts, index), text=text, way_out="mount a PersistentVolumeClaim there")
    if not opened.writes and "emptyDir" in volume[1] and not _is_filled(container, str(mount.get("name"))):
        text = f"{_name(opened)} is in a new empty directory, and no init container fills it"
        yield ClusterFault(item=item, way=(*mounts, index), text=text, way_out="mount the claim that holds it")
    yield from _downloaded(cluster, container, opened, (*mounts, index), volume[1])
    if opened.files:
        yield from _files(cluster, container, opened, volume)


def _name(opened: OpenedPath) -> str:
    return f"{opened.setting} {opened.path}" if opened.setting else opened.path


def _program(container: ContainerSpec) -> str:
    return f"`gspo {process_of(container)}`" if process_of(container) else "its process"


def _unmounted(container: ContainerSpec, opened: OpenedPath) -> tuple[str, str] | None:
    """What is wrong and what to do, where no volume holds the path; None for what the image itself may hold."""
    fixed = at(container.data, "securityContext", "readOnlyRootFilesystem") is True
    if opened.lasts:
        text = f"{_name(opened)} is on no claim: what {_program(container)} has written ends with its pod"
        return text, "mount a PersistentVolumeClaim there"
    if opened.writes:
        text = f"its root is read-only and nothing is mounted at {opened.path}: {_program(container)} cannot write there"
        return (text, f"mount an emptyDir at {opened.path}") if fixed else None
    if not opened.path.startswith("/"):
        text = f"{_name(opened)} does not begin with /, and what it would belong to is a directory of the image"
        return text, "write the whole path, on a volume that the pod mounts"
    text = f"nothing is mounted where {opened.setting} is, {opened.path}: {_program(container)} opens it and ends"
    return text, "mount the volume that holds it in this container, or correct the path"


def _is_filled(container: ContainerSpec, volume: str) -> bool:
    return any(
        mount.get("name") == volume and not mount.get("readOnly")
        for other in container.pods.containers
        if other.place == "initContainers"
        for mount in items_at(other.data, "volumeMounts")
    )


def _downloaded(
    cluster: ClusterModel, container: ContainerSpec, opened: OpenedPath, way: Way, volume: Object
) -> Iterator[ClusterFault]:
    """A claim that components/model-download fills has what MODEL and DATASET name, under the last part of their names."""
    claim = at(volume, "persistentVolumeClaim", "claimName")
    for pods, _ in cluster.users_of_claim(str(claim), container.pods.namespace) if claim else ():
        for other in pods.containers if pods.count != 0 else ():
            wanted = [other.environment[name] for name in ("MODEL", "DATASET") if other.environment.get(name)]
            root = _root_of(other, str(claim))
            there = [f"{root}/{name.rpartition('/')[2]}" for name in wanted]
            if "hf download" in " ".join(map(str, items_at(other.data, "args"))) and not any(
                f"{opened.path}/".startswith(f"{place}/") for place in there
            ):
                yield ClusterFault(
                    item=container.pods.owner, way=way,
                    text=f"{_name(opened)} is not what {pods.kind}/{pods.name} downloads: {', '.join(there)}",
                    way_out=f"correct {opened.setting}, or MODEL or DATASET of {pods.name}",
                )  # fmt: skip


def _root_of(container: ContainerSpec, claim: str) -> str:
    """Where the container mounts the claim."""
    for mount in items_at(container.data, "volumeMounts"):
        volume = container.pods.volume(str(mount.get("name")))
        if volume is not None and at(volume[1], "persistentVolumeClaim", "claimName") == claim:
            return str(mount.get("mountPath")).rstrip("/")
    return ""


def _files(
    cluster: ClusterModel, container: ContainerSpec, opened: OpenedPath, volume: tuple[Way, Object]
) -> Iterator[ClusterFault]:
    """A directory of Secrets holds what the process needs of it, and nobody else's secret key."""
    pods, own = container.pods, process_of(container)
    sources = [at(source, "secret") for source in items_at(volume[1], "projected", "sources")]
    names = [str(source.get("name")) for source in sources if source]
    if name := at(volume[1], "secret", "secretName"):
        names = [str(name)]
    there = {
        str(file)
        for name in names
        for part in ("data", "stringData")
        for file in at(cluster.find("Secret", name, pods.namespace), part)
    }
    missing = [pattern for pattern in opened.files if not any(fnmatchcase(file, pattern) for file in there)]
    if missing and names:
        yield ClusterFault(
            item=pods.owner, way=volume[0],
            text=f"{_name(opened)} has no {', '.join(missing)}: its Secrets {', '.join(names)} hold "
            f"{', '.join(sorted(there)) or 'nothing, or are not there'}, and {_program(container)} needs these keys",
            way_out="make them with `gspo keys` and add the component keys; Secrets that are on the cluster already: put "
            f"what `kubectl -n {pods.namespace} get secrets -o yaml` prints beside the manifests",
        )  # fmt: skip
    owners = ("broker", "operator") if own == "broker" else (own,)  # Commands of the operator are given in the broker's pod.
    for file in sorted(file for file in there if file.endswith(".secret") and not file.startswith(owners)):
        text = f"{_name(opened)} holds {file}, the key of another process: whoever reads this pod can be that one"
        yield ClusterFault(item=pods.owner, way=volume[0], text=text, way_out=f"leave {file} out of the pod's Secrets")
    mode = at(volume[1], "projected", "defaultMode") or at(volume[1], "secret", "defaultMode") or 0o644
    if there and isinstance(mode, int) and mode & EVERYBODY:
        text = f"every user of the container can read its secret key (defaultMode 0{mode:o})"
        yield ClusterFault(item=pods.owner, way=volume[0], text=text, way_out="write defaultMode: 0440", status="warn")
