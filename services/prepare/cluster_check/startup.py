"""Starts every container: entry point, arguments, settings, and the directories that its process reads and writes."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ENTRY_POINT,
    IMAGES,
    LWS_VARIABLES,
    OTHER_COMMANDS,
    PROCESSES,
    PROGRAMS,
    VARIABLE,
    ClusterFault,
    ClusterModel,
    ContainerSpec,
    PodTemplate,
    at,
    config_map_of,
    image_of,
    is_ours,
    items_at,
    process_container,
    process_of,
    quantity_or_zero,
    settings_of,
    started,
    words_of,
)
from gspo_services.shared.settings import RESERVED, Settings

PREFIX: Final = "GSPO_"
PARAMETERS: Final = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)B(?![A-Za-z0-9])")
"""The number of parameters in a model's name, in billions: Qwen3-30B-A3B."""
CHECKPOINT_BYTES: Final = 12
"""Of a parameter, in a checkpoint: its float32 copy and two moments."""
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def commands(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Every container of ours starts a program that its image has, with arguments that this program takes."""
    for container in cluster.containers:
        if not is_ours(container):
            continue
        item, words = container.pods.owner, words_of(container)
        known = container.variables | (LWS_VARIABLES if container.pods.kind == "LeaderWorkerSet" else set())
        for name in sorted(set(VARIABLE.findall(" ".join(words))) - known):
            yield ClusterFault(
                item=item,
                way=(*container.way, "args"),
                text=f"$({name}) is no variable of the container: it stays as it is",
                way_out=f"add {name} to env, or correct the name",
            )
        if words[0] not in PROGRAMS:
            yield ClusterFault(
                item=item,
                way=(*container.way, "command"),
                text=f"`command` replaces the image's entry point: it starts a program {words[0]!r}, which is not there",
                way_out=f"write args: [{', '.join(words)}] in place of command",
            )
        elif words[0] == ENTRY_POINT:
            yield from _process(cluster, container, words)


def _process(cluster: ClusterModel, container: ContainerSpec, words: list[str]) -> Iterator[ClusterFault]:
    item, way = container.pods.owner, (*container.way, "args")
    process = process_of(container)
    if not process:
        if words[1:2] == [] or words[1] not in OTHER_COMMANDS:
            text = f"`gspo {' '.join(words[1:2])}` is no command"
            yield ClusterFault(item=item, way=way, text=text, way_out=f"write one of {', '.join(PROCESSES)}")
        return
    if process not in IMAGES[image_of(container)]:
        text = f"the image {image_of(container)} has not the packages of `gspo {process}`"
        yield ClusterFault(item=item, way=(*container.way, "image"), text=text, way_out=f"use gspo-{process} or gspo-cpu")
    configs = [word for word in words if word.endswith(".toml")]
    if configs and config_map_of(cluster, container, configs[0]) is None:
        text = (
            f"{configs[0]} is not there: no ConfigMap with {Path(configs[0]).name} is mounted at {Path(configs[0]).parent}"
        )
        yield ClusterFault(item=item, way=way, text=text, way_out="name the file where the volume config is mounted")
        return
    found = started(cluster, container.pods)
    if found.arguments_refused:
        text = f"`gspo {process}` refuses its arguments: {found.arguments_refused}"
        yield ClusterFault(item=item, way=way, text=text, way_out=f"`gspo {process} --help` lists what it takes")
    if found.configuration_refused:
        config_map = cluster.find("ConfigMap", (config_map_of(cluster, container, configs[0]) or ("", ""))[0])
        key = Path(configs[0]).name if configs else "run.toml"
        yield ClusterFault(
            item=config_map or item,
            way=("data", key) if config_map else way,
            text=f"{container.pods.kind}/{container.pods.name} ends with status 2: {found.configuration_refused}",
            way_out="correct run.toml, or the variable or --set that is named",
        )
    if process == "rollout" and found.settings and "$(" not in found.name and container.pods.count != 1:
        text = f"all of its pods are called {found.name!r}: the broker takes only one of them"
        yield ClusterFault(
            item=item, way=way, text=text, way_out="write --name $(POD_NAME), with POD_NAME from metadata.name"
        )


def variables(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Variables that are meant as settings are read as such."""
    for container in cluster.containers:
        for index, entry in enumerate(items_at(container.data, "env")):
            name = str(entry.get("name"))
            prefix, _, rest = name.partition("_")
            near = SequenceMatcher(None, prefix + "_", PREFIX).ratio() >= 0.75
            single = name.startswith(PREFIX) and "__" not in name and name not in RESERVED
            if (near and not name.startswith(PREFIX) and "__" in rest) or single:
                yield ClusterFault(
                    item=container.pods.owner,
                    way=(*container.way, "env", index, "name"),
                    text=f"no process reads {name}: settings are {PREFIX}SECTION__KEY",
                    way_out=f"write {PREFIX}{rest}"
                    if near and not single
                    else "write two underscores between section and key",
                )


def configurations(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """A changed ConfigMap reaches its readers."""
    for container in cluster.containers:
        for index, mount in enumerate(items_at(container.data, "volumeMounts")):
            volume = container.pods.volume(str(mount.get("name")))
            if volume and {"configMap", "secret", "projected"} & set(volume[1]) and mount.get("subPath"):
                yield ClusterFault(
                    item=container.pods.owner,
                    way=(*container.way, "volumeMounts", index, "subPath"),
                    text="a file that is mounted by subPath is never updated: it stays as it was at the pod's start",
                    way_out=f"mount the whole volume at {str(mount.get('mountPath')).rpartition('/')[0] or '/'}",
                )


def volumes(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """An ordinary user can write to fresh volumes, and a model's files, checkpoints and versions fit where they go."""
    for container in cluster.containers:
        yield from _writable_claims(cluster, container)
    for pods in cluster.pods:
        settings, process = settings_of(cluster, pods), process_container(pods)
        if settings is not None and process is not None and process_of(process) == "rollout":
            yield from _memory_for_weights(pods, process, settings)
        elif settings is not None and process is not None and process_of(process) == "learner":
            yield from _room_on_claims(cluster, process, settings)


def _writable_claims(cluster: ClusterModel, container: ContainerSpec) -> Iterator[ClusterFault]:
    """A fresh volume belongs to root: without fsGroup an ordinary user cannot write to it."""
    pods = container.pods
    security = {**at(pods.spec, "securityContext"), **at(container.data, "securityContext")}
    if security.get("runAsUser") == 0 or "fsGroup" in security or cluster.is_openshift:
        return
    for index, mount in enumerate(items_at(container.data, "volumeMounts")):
        volume = pods.volume(str(mount.get("name")))
        claimed = volume and ({"persistentVolumeClaim", "volumeClaimTemplate"} & set(volume[1]))
        read_only = mount.get("readOnly") or (volume and at(volume[1], "persistentVolumeClaim", "readOnly"))
        if claimed and not read_only:
            yield ClusterFault(
                item=pods.owner,
                way=(*container.way, "volumeMounts", index),
                text=f"user {security.get('runAsUser', 'of the image')} cannot write to {mount.get('mountPath')}: a new "
                "volume belongs to root, and the pod has no fsGroup",
                way_out="write fsGroup: 10001 in the pod's securityContext",
            )


def _memory_for_weights(pods: PodTemplate, container: ContainerSpec, settings: Settings) -> Iterator[ClusterFault]:
    """A rollout keeps a whole version in rollout.weights_directory, in memory."""
    directory = str(settings.rollout.weights_directory)
    found = container.mount(directory)
    volume = pods.volume(str(found[1].get("name"))) if found else None
    if volume is None or at(volume[1], "emptyDir", "medium") != "Memory":
        text = f"rollout.weights_directory {directory} is no memory file system: each version would be written to a disk"
        yield ClusterFault(
            item=pods.owner, way=(*container.way, "volumeMounts"), text=text,
            way_out="mount an emptyDir with medium: Memory there",
        )  # fmt: skip
        return
    size = quantity_or_zero(at(volume[1], "emptyDir", "sizeLimit") or 0)
    limit = quantity_or_zero(at(container.data, "resources", "limits", "memory") or 0)
    needed = _parameters(settings) * DTYPE_BYTES.get(settings.model.dtype, 2)
    way = (*volume[0], "emptyDir", "sizeLimit")
    if size and size < needed:
        yield ClusterFault(
            item=pods.owner,
            way=way,
            text=f"{directory} has {size / 2**30:.0f} GiB, and a version of {settings.model.path.name} in "
            f"{settings.model.dtype} has about {needed / 2**30:.0f}: the first update fails",
            way_out=f"write sizeLimit: {needed * 1.3 / 2**30:.0f}Gi, and raise the memory limit by as much",
        )
    if limit and size >= limit:
        text = f"{directory} may take {size / 2**30:.0f} GiB, all of the container's memory ({limit / 2**30:.0f} GiB)"
        yield ClusterFault(item=pods.owner, way=way, text=text, way_out="raise the memory limit, or lower sizeLimit")


def _room_on_claims(cluster: ClusterModel, container: ContainerSpec, settings: Settings) -> Iterator[ClusterFault]:
    """The model's files and all checkpoints, with the one that is being written, fit on their claims."""
    checkpoints = 0 if settings.lora.rank else settings.learner.keep_checkpoints + 1
    for path, what, needed in (
        (settings.model.path, "its files have", DTYPE_BYTES.get(settings.model.dtype, 2)),
        (settings.run.directory, f"{checkpoints} checkpoints of it have", CHECKPOINT_BYTES * checkpoints),
    ):
        needed_gib = _parameters(settings) * needed / 2**30
        found = container.mount(str(path))
        volume = container.pods.volume(str(found[1].get("name"))) if found else None
        name = at(volume[1], "persistentVolumeClaim", "claimName") if volume else None
        claim = cluster.find("PersistentVolumeClaim", str(name), container.pods.namespace)
        way = ("spec", "resources", "requests", "storage")
        size_gib = quantity_or_zero(at(claim, *way)) / 2**30
        if claim and size_gib < needed_gib:
            text = f"{size_gib:.0f} GiB are too small for {settings.model.path.name}: {what} about {needed_gib:.0f} GiB"
            yield ClusterFault(item=claim, way=way, text=text, way_out=f"write storage: {needed_gib * 1.3:.0f}Gi")


def _parameters(settings: Settings) -> float:
    """As the model's name tells; 0 for a name that does not."""
    return max(map(float, PARAMETERS.findall(settings.model.path.name)), default=0.0) * 1e9
