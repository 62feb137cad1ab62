"""Starts containers on paper: the image's entry point, the arguments by the parsers of the processes, the settings."""

import argparse
import contextlib
import io
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from gspo_services.prepare.cluster_check.model.manifests import ClusterModel, ContainerSpec, PodTemplate
from gspo_services.prepare.cluster_check.model.objects import at, items_at
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Process, Settings, parse_process_arguments

ENTRY_POINT: Final = "gspo"
IMAGES: Final[dict[str, frozenset[str]]] = {
    "gspo-broker": frozenset({"broker"}),
    "gspo-rollout": frozenset({"broker", "rollout"}),
    "gspo-learner": frozenset({"broker", "learner"}),
    "gspo-cpu": frozenset({"broker", "learner", "rollout"}),
}
"""By image: the processes that it has the packages for."""
PROCESSES: Final[tuple[Process, ...]] = ("broker", "rollout", "learner")
OTHER_COMMANDS: Final = frozenset({
    "accept-loss", "audit", "backup", "check", "compare", "completion", "data", "doctor", "env", "environments", "eval",
    "export", "generate", "init", "keys", "model", "plot", "replay", "requeue", "restore", "run", "sandbox", "serve",
    "setup", "sglang-cpu", "stop", "tasks", "track", "view",
})  # fmt: skip
"""What `gspo` does beside starting a process of the run."""
PROGRAMS: Final = frozenset({"gspo", "sh", "bash", "sleep", "python", "python3", "hf", "env", "cat", "true", "cp", "test"})
"""What can be started by its name in our images."""
VARIABLE: Final = re.compile(r"\$\((\w+)\)")
POD_INDEX: Final = "metadata.labels['apps.kubernetes.io/pod-index']"
LWS_VARIABLES: Final = frozenset({"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"})


@dataclass(frozen=True, kw_only=True)
class ContainerStart:
    """What comes of starting a container of ours: its settings, or why there are none."""

    settings: Settings | None = None
    name: str = ""
    arguments_refused: str = ""
    configuration_refused: str = ""


def image_of(container: ContainerSpec) -> str:
    """The image's name without registry, tag and digest."""
    return str(container.data.get("image", "")).partition("@")[0].rpartition("/")[2].partition(":")[0]


def is_ours(container: ContainerSpec) -> bool:
    """Whether the container has one of our images."""
    return image_of(container) in IMAGES


def words_of(container: ContainerSpec) -> list[str]:
    """The command line of the container's process."""
    command = [str(word) for word in items_at(container.data, "command")]
    return [*(command or [ENTRY_POINT]), *(str(word) for word in items_at(container.data, "args"))]


def process_of(container: ContainerSpec) -> Process | Literal[""]:
    """broker, rollout or learner; empty for all else."""
    words = words_of(container)
    if not is_ours(container) or words[0] != ENTRY_POINT:
        return ""
    return next((process for process in PROCESSES if words[1:2] == [process]), "")


def process_container(pods: PodTemplate) -> ContainerSpec | None:
    """The container with one of the run's processes."""
    return next((container for container in pods.main if process_of(container)), None)


def config_map_of(cluster: ClusterModel, container: ContainerSpec, path: str) -> tuple[str, str] | None:
    """The name of the ConfigMap that is mounted at ``path``, and the file's text."""
    found = container.mount(path)
    volume = container.pods.volume(str(found[1].get("name"))) if found else None
    if found is None or volume is None:
        return None
    name = str(at(volume[1], "configMap", "name") or "")
    item = cluster.find("ConfigMap", name, container.pods.namespace)
    text = at(item, "data", Path(path).name)
    return (name, text) if isinstance(text, str) else None


def started(cluster: ClusterModel, pods: PodTemplate, index: int | None = None) -> ContainerStart:
    """What the process of these pods starts with, in the first pod or in pod number ``index``."""
    container = process_container(pods)
    if container is None:
        return ContainerStart()
    number = str(pods.first_index if index is None else index)
    numbered = {"LWS_WORKER_INDEX"} if pods.kind == "LeaderWorkerSet" else set()
    for entry in items_at(container.data, "env"):
        if at(entry, "valueFrom", "fieldRef", "fieldPath") == POD_INDEX:
            numbered.add(str(entry.get("name")))
    words = [
        VARIABLE.sub(lambda found: number if found[1] in numbered else found[0], word) for word in words_of(container)[2:]
    ]
    config = next((word for word in words if word.endswith(".toml")), "")
    text = config_map_of(cluster, container, config)
    environment = {key: value for key, value in container.environment.items() if key.startswith("GSPO_")}
    return _start(process_of(container), tuple(words), config, "" if text is None else text[1], _frozen(environment))


def settings_of(cluster: ClusterModel, pods: PodTemplate) -> Settings | None:
    """The settings of the process of these pods; None where it has none or does not get that far."""
    return started(cluster, pods).settings


def _frozen(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(environment.items()))


@lru_cache(maxsize=256)
def _start(
    process: str, words: tuple[str, ...], config: str, text: str, environment: tuple[tuple[str, str], ...]
) -> ContainerStart:
    errors = io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.toml"
        path.write_text(text, encoding="utf-8")
        given = [str(path) if word == config and config else word for word in words]
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
                found = parse_process_arguments(f"gspo {process}", "", process, given, environment=dict(environment))
        except ConfigurationError as error:
            return ContainerStart(configuration_refused=str(error).replace(str(path), "run.toml"))
        except (SystemExit, argparse.ArgumentError):
            return ContainerStart(arguments_refused=errors.getvalue().strip().rpartition("\n")[2].partition("error: ")[2])
    return ContainerStart(settings=found.settings, name=found.name)
