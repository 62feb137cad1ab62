"""A pod's view on this machine, without root and without a cluster: bubblewrap shows the container's program the image, what
the pod mounts, and nothing else. Volumes hold what the process says that it opens, so that this list is proven, too.
"""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet

from gspo_services.shared.settings import OpenedPath, opened_paths
from tests.deploy.cluster import POD_INDEX, Cluster, Object, Pods
from tests.pods.container import REPOSITORY, arguments, environment

MODEL: Final = REPOSITORY / "models" / "tiny"
INSIDE: Final = Path(__file__).with_name("inside.py")
SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib64", "/sbin")
SETTINGS_OF_HOSTS: Final = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "alternatives", "localtime")
ANY_USER: Final = 1_000_650_000
"""The kind of user that OpenShift gives a pod."""
POSITIONS: Final = 40_960
"""Qwen3's: the tiny model has fewer."""
ENGINE_PORT: Final = 30_000
HUB_PORT: Final = 30_001
DEVICE: Final = {"DS_ACCELERATOR": "cpu", "GSPO_LEARNER__NUM_RANKS": "1", "OMP_NUM_THREADS": "1"}
"""The only variables that differ from the pod's: there is no GPU here."""
START_S: Final = 90.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """What came of a start."""

    started: bool
    status: int
    readyz: str
    log: str


def start(cluster: Cluster, pods: Pods, process: Any, directory: Path, *, event: str = "", waits: str = "") -> Start:
    """Start the main container of the first of these pods until its startup probe succeeds, then end it.

    ``directory``: an empty one for volumes. ``event``: what its log must say, too; ``waits``: what its /readyz must.
    """
    opened = list(opened_paths(cluster.settings(pods, pods.indices[0]), process))
    variables = {"GSPO_ROLLOUT__SERVER_URL": f"http://127.0.0.1:{ENGINE_PORT}"} if process == "rollout" else {}
    # A standby has started when it has the database, and waits for it here.
    probe = {**pods.main["startupProbe"]["httpGet"], **({"path": "/healthz"} if waits else {})}
    wanted = {"port": pods.ports[probe["port"]], "path": probe["path"], "event": event, "waits": waits}
    return _run(cluster, pods, pods.main, opened, directory, wanted, DEVICE | variables)


def start_other(cluster: Cluster, pods: Pods, container: Object, directory: Path, *, event: str = "") -> Start:
    """Start a container without a probe, on new volumes, until it has ended or its log says ``event``."""
    wanted = {"port": 0, "path": "", "event": event, "waits": ""}
    return _run(cluster, pods, container, [], directory, wanted, {"HF_ENDPOINT": f"http://127.0.0.1:{HUB_PORT}"})


def _run(
    cluster: Cluster, pods: Pods, container: Object, opened: list[OpenedPath], directory: Path, wanted: Object,
    more: dict[str, str],
) -> Start:  # fmt: skip
    index, owner = pods.indices[0], pods.owner["metadata"]["name"]
    fields = {"metadata.name": f"{owner}-{index}", POD_INDEX: str(index), "status.podIP": "127.0.0.1"}
    container = _with_secrets(cluster, container)
    variables = {**environment(container, fields), "LWS_WORKER_INDEX": str(index), **more}
    variables = {name: value.replace("$(POD_IP)", "127.0.0.1") for name, value in variables.items()}
    wanted = {
        **wanted, "command": arguments(container, variables), "engine_port": ENGINE_PORT, "hub_port": HUB_PORT,
        "timeout_s": START_S,
    }  # fmt: skip
    # As kubelet's: of all names only the pod's own.
    hosts = directory / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {owner}-{index} {owner}-{index}.{pods.owner['spec'].get('serviceName', owner)}\n")
    words = ["bwrap", *_walls(pods), *_mounts(cluster, pods, container, opened, directory)]
    words += ["--ro-bind", str(hosts), "/etc/hosts"]
    words += ["--remount-ro", "/", "--chdir", str(container.get("workingDir", "/"))]
    words += ["--clearenv", *(word for item in variables.items() for word in ("--setenv", *item))]
    words += ["--", sys.executable, str(INSIDE), json.dumps(wanted)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_S + 120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Start(**json.loads(done.stdout))


def _with_secrets(cluster: Cluster, container: Object) -> Object:
    """The container with the values of its Secrets in its environment; what is optional and absent is left out."""
    given = []
    for entry in container.get("env", []):
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        if reference is None:
            given.append(entry)
        elif (secret := cluster.find("Secret", reference["name"])) and reference["key"] in secret["data"]:
            given.append({"name": entry["name"], "value": base64.b64decode(secret["data"][reference["key"]]).decode()})
    return {**container, "env": given}


def _walls(pods: Pods) -> Iterator[str]:
    user = str(pods.spec["securityContext"].get("runAsUser", ANY_USER))
    yield from ("--unshare-all", "--die-with-parent", "--uid", user, "--gid", user, "--cap-drop", "ALL", "--tmpfs", "/")
    for path in (*SYSTEM, *(f"/etc/{name}" for name in SETTINGS_OF_HOSTS), sys.base_prefix):
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev")


def _mounts(cluster: Cluster, pods: Pods, container: Object, opened: list[OpenedPath], directory: Path) -> Iterator[str]:
    mounts = sorted(container.get("volumeMounts", []), key=lambda mount: str(mount["mountPath"]))
    for mount in mounts:
        volume, place = pods.volume(mount["name"]), str(mount["mountPath"])
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            yield from ("--tmpfs", place)
            continue
        path = directory / mount["name"]
        path.mkdir()
        _fill(cluster, pods, volume, path)
        for each in opened:
            if not each.writes and each.path.startswith(f"{place}/") and _holds_files(pods, volume):
                _write(path / each.path.removeprefix(f"{place}/"))
        fixed = mount.get("readOnly") or {"configMap", "projected", "secret"} & set(volume)
        yield from ("--ro-bind" if fixed else "--bind", str(path), place)
    # The image's own files, also where a volume covers the checkout that stands for it.
    for path in {REPOSITORY, Path(sys.prefix)}:
        yield from ("--ro-bind", str(path), str(path))


def _holds_files(pods: Pods, volume: Object) -> bool:
    """Whether something else writes to the volume: what fills its claim, or an init container."""
    before = [mount["name"] for each in pods.spec.get("initContainers", []) for mount in each.get("volumeMounts", [])]
    return "persistentVolumeClaim" in volume or volume["name"] in before


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        numbers = range(10 if "train" in path.name else 5)
        rows = {"question": [f"{path.name} {n}" for n in numbers], "answer": [f"#### {n}" for n in numbers]}
        pyarrow.parquet.write_table(pa.table(rows), path)
    else:
        shutil.copytree(MODEL, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))


def _fill(cluster: Cluster, pods: Pods, volume: Object, path: Path) -> None:
    if "configMap" in volume:
        for name, text in cluster.one("ConfigMap", volume["configMap"]["name"])["data"].items():
            (path / name).write_text(text)
    for source in volume.get("projected", {}).get("sources", []):
        secret = cluster.find("Secret", source["secret"]["name"])
        assert secret is not None or source["secret"].get("optional"), f"{pods.name}: no Secret {source['secret']['name']}"
        for name, value in (secret or {"data": {}})["data"].items():
            (path / name).write_bytes(base64.b64decode(value))
            (path / name).chmod(0o640)
