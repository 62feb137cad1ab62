"""A Kubernetes on one machine, with what the manifests of a run need: pods of Deployments and StatefulSets in network
namespaces, with the manifests' own arguments, environment, volumes, user and policies. Pods that end are started again.
"""

import base64
import http.client
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from tests.deploy.cluster import POD_INDEX, Cluster, Object, Pods, matches
from tests.pods.container import entering, script
from tests.pods.network import Bridge, Network

PROBE_TIMEOUT_S: Final = 5.0
RESTARTS_ALLOWED: Final = 10
Ports = tuple[int, int]
"""The first and the last."""
ALL_PORTS: Final = (0, 65535)


@dataclass
class Pod:
    """One running pod."""

    name: str
    pods: Pods
    address: str
    started: float
    process: "subprocess.Popen[bytes]"
    log: Path
    num_restarts: int = 0
    deleted: bool = False
    statuses: list[int] = field(default_factory=list)

    @property
    def role(self) -> str:
        return self.pods.role


class Node:
    """The machine with its pods; use as a context manager: leaving it ends all pods."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        model: Path,
        *,
        bridge: Bridge | None = None,
        admit: Callable[[Pods], None] = lambda pods: None,
    ) -> None:
        """``directory``: volumes and logs. ``model``: what the volume "model" of every pod has from the start. ``bridge``:
        one that the pods of other runs are on too. ``admit``: raises what an API server says to a pod that it refuses.
        """
        self._cluster = cluster
        self._directory = directory
        self._model = model
        directory.mkdir(mode=0o755)
        self._admit = admit
        self.network = Network(directory / "hosts", bridge)
        self.pods: dict[str, Pod] = {}
        self.gone: list[Pod] = []
        self._counts: dict[str, int] = {}
        self._owner = int(cluster.role("broker").spec["securityContext"]["fsGroup"])

    def __enter__(self) -> "Node":
        self.network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            _kill(pod)
        self.network.__exit__()

    # --- what a user does --------------------------------------------------------------------------------------------

    def apply(self, *, rollouts: int) -> None:
        """Start broker, learner and ``rollouts`` of the rollouts."""
        self.start("broker-0", "broker")
        self.start("learner-0", "learner")
        self.scale(rollouts)

    def start(self, name: str, role: str) -> Pod:
        """Start one pod of the template of ``role``."""
        return self._start(name, self._cluster.role(role))

    def scale(self, number: int) -> list[Pod]:
        """Start new rollouts, or ask the newest to end, until there are ``number``; returns those that changed."""
        running = [pod for pod in self.pods.values() if pod.role == "rollout" and not pod.deleted]
        changed = running[number:]
        for pod in changed:
            self.delete(pod)
        for _ in range(number - len(running)):
            self._counts["rollout"] = count = self._counts.get("rollout", 0) + 1
            changed.append(self.start(f"rollout-6f9c-{count}", "rollout"))
        return changed

    def resize(self, kind: str, name: str, replicas: int) -> None:
        """``kubectl scale`` of any workload, which makes or ends pods until it has ``replicas``."""
        pods = next(pods for pods in self._cluster.pods if (pods.kind, pods.owner["metadata"]["name"]) == (kind, name))
        pods.owner["spec"]["replicas"] = replicas
        running = [pod for pod in self.pods.values() if pod.pods.owner is pods.owner and not pod.deleted]
        if pods.role == "rollout":
            self.scale(replicas)
            return
        for pod in running[replicas:]:
            self.delete(pod)
        for index in range(len(running), replicas):
            self.start(f"{name}-{index}" if kind == "StatefulSet" else f"{name}-7d4c-{index}", pods.role)

    def execute(self, pod: Pod, words: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
        """``kubectl exec``."""
        fields = self._fields(pod.name)
        line = entering(pod.process.pid, pod.pods.main, pod.pods.spec["securityContext"], fields, words)
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s)

    def add(self, item: Object) -> None:
        """``kubectl create``."""
        self._cluster.objects.append(item)

    def delete_claim(self, claim: str) -> None:
        """``kubectl delete pvc``, with what is on the volume. Raises: AssertionError while a pod has it."""
        users = [pod.name for pod in self.pods.values() if claim in self._claims(pod.name, pod.pods).values()]
        assert not users, f"{claim} is in use by {users}"
        shutil.rmtree(self.volume(claim))

    def update(self) -> list[Pod]:
        """``kubectl apply`` of objects that have changed, as the StatefulSet controller takes it: it replaces its pods, and
        with OrderedReady none that is not ready. Returns the pods that are asked to end.
        """
        ended = []
        for pod in list(self.pods.values()):
            parallel = pod.pods.owner["spec"].get("podManagementPolicy") == "Parallel"
            if pod.pods.kind == "StatefulSet" and (parallel or self.is_ready(pod)):
                self.delete(pod)
                ended.append(pod)
        return ended

    def delete(self, pod: Pod) -> None:
        """``kubectl delete pod``: sends SIGTERM; ``look`` does the rest."""
        pod.deleted = True
        pod.process.send_signal(signal.SIGTERM)

    def kill(self, pod: Pod) -> None:
        """The container dies at once with everything in it; ``look`` starts it again."""
        _kill(pod)

    def stop(self, pod: Pod) -> None:
        """Send SIGTERM and wait for the pod's end; it is not replaced, as when its owner is scaled to zero."""
        pod.process.send_signal(signal.SIGTERM)
        pod.statuses.append(pod.process.wait(pod.pods.spec["terminationGracePeriodSeconds"]))
        _kill(pod)
        del self.pods[pod.name]
        self.gone.append(pod)
        self.network.remove(pod.name)

    def volume(self, claim: str) -> Path:
        """The directory of a claimed volume; makes it when it is not there yet."""
        path = self._directory / "claims" / claim
        if not path.is_dir():
            path.mkdir(parents=True)
            path.chmod(0o777)
        return path

    # --- what Kubernetes does ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Restart containers that ended, in the same pod; replace deleted pods of StatefulSets; forget the others."""
        for pod in list(self.pods.values()):
            status = pod.process.poll()
            if status is None:
                continue
            _kill(pod)
            pod.statuses.append(status)
            if pod.deleted:
                del self.pods[pod.name]
                self.gone.append(pod)
                self.network.remove(pod.name)
                owner = self._cluster.find(pod.pods.kind, pod.pods.owner["metadata"]["name"])
                if pod.pods.kind == "StatefulSet" and owner and int(pod.name.rpartition("-")[2]) in pod.pods.indices:
                    self._start(pod.name, pod.pods)
                continue
            pod.num_restarts += 1
            if pod.num_restarts > RESTARTS_ALLOWED:
                raise RuntimeError(f"{pod.name} ended {pod.num_restarts} times: {pod.log}\n{pod.log.read_text()[-2000:]}")
            pod.process = self._launch(pod.name, pod.pods, pod.log)

    def is_ready(self, pod: Pod) -> bool:
        """Whether its readiness probe succeeds."""
        return self.get(pod, pod.pods.main["readinessProbe"]["httpGet"])[0] == 200

    def get(self, pod: Pod, probe: Object) -> tuple[int, str]:
        """Status and text of an HTTP GET at the pod's own address; (0, reason) without an answer."""
        port = pod.pods.ports[probe["port"]]

        def ask() -> tuple[int, str]:
            connection = http.client.HTTPConnection(pod.address, port, timeout=PROBE_TIMEOUT_S)
            try:
                connection.request("GET", probe["path"])
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                return 0, str(error)
            finally:
                connection.close()

        return self.network.inside(pod.name, ask)

    def metrics(self, pod: Pod) -> dict[str, float]:
        """Its samples by name and labels; empty while it does not answer."""
        status, text = self.get(pod, {"port": "metrics", "path": "/metrics"})
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")] if status == 200 else []
        return {name: float(value) for name, _, value in lines}

    def _start(self, name: str, pods: Pods) -> Pod:
        self._admit(pods)
        address = self.network.add(name)
        log = self._directory / "logs" / f"{name}-{address.rpartition('.')[2]}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        pod = Pod(name, pods, address, started, self._launch(name, pods, log), log)
        self.pods[name] = pod
        self._apply_network()
        return pod

    def _launch(self, name: str, pods: Pods, log: Path) -> "subprocess.Popen[bytes]":
        """Start the main container's process; the init containers' work, filling the volume "model", is already done."""
        claims = {volume: self.volume(claim) for volume, claim in self._claims(name, pods).items()}
        own = [volume for volume in pods.spec.get("volumes", []) if volume["name"] not in claims]
        volumes: dict[str, Path | str] = {**claims, **{volume["name"]: self._volume(name, volume) for volume in own}}
        root = self._directory / "roots" / name
        root.mkdir(parents=True, exist_ok=True)
        hosts = self._directory / "hosts"
        text = script(pods.main, pods.spec["securityContext"], volumes, self._fields(name), hosts, root)
        namespace = self.network.namespace(name)
        words = [
            "ip",
            "netns",
            "exec",
            namespace,
            "unshare",
            "--uts",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            text,
        ]
        with log.open("ab") as output:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=dict(os.environ)
            )

    @staticmethod
    def _fields(name: str) -> dict[str, str]:
        return {"metadata.name": name, POD_INDEX: name.rpartition("-")[2]}

    @staticmethod
    def _claims(name: str, pods: Pods) -> dict[str, str]:
        """The claims that a pod mounts, by volume."""
        found = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pods.spec.get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        templates = pods.owner["spec"].get("volumeClaimTemplates", [])
        return found | {each["metadata"]["name"]: f"{each['metadata']['name']}-{name}" for each in templates}

    def _volume(self, pod: str, volume: Object) -> Path | str:
        if "emptyDir" in volume:
            if volume["emptyDir"].get("medium") == "Memory":
                return str(volume["emptyDir"]["sizeLimit"]).removesuffix("i").lower()
            return self._filled(self._directory / "pods" / pod / volume["name"], volume["name"])
        path = self._directory / "pods" / pod / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            data = self._cluster.one("ConfigMap", volume["configMap"]["name"])["data"]
            for file, content in data.items():
                (path / file).write_text(content)
        for source in volume.get("projected", {}).get("sources", []):
            self._write_secret(path, source["secret"])
        return path

    def _write_secret(self, path: Path, reference: Object) -> None:
        secret = self._cluster.find("Secret", reference["name"])
        if secret is None:
            assert reference.get("optional"), f"no Secret {reference['name']}"
            return
        for file, content in secret["data"].items():
            (path / file).write_bytes(base64.b64decode(content))
            os.chown(path / file, self._owner, self._owner)
            (path / file).chmod(0o440)

    def _filled(self, path: Path, name: str) -> Path:
        if not path.is_dir():
            path.mkdir(parents=True)
            if name == "model":
                shutil.copytree(self._model, path / self._model.name)
                for file in path.rglob("*"):
                    file.chmod(0o777)
            path.chmod(0o777)
        return path

    # --- names and policies ------------------------------------------------------------------------------------------

    def _apply_network(self) -> None:
        names = {pod.name: pod.address for pod in self.pods.values()}
        for service in self._cluster.of_kind("Service"):
            for pod in self.pods.values():
                if matches(service["spec"]["selector"], pod.pods.labels):
                    name = service["metadata"]["name"]
                    names.setdefault(name, pod.address)
                    if pod.pods.kind == "StatefulSet" and pod.pods.owner["spec"]["serviceName"] == name:
                        names[f"{pod.name}.{name}"] = pod.address
        self.network.name(names)
        self.network.allow({edge for source in self.pods.values() for edge in self._allowed(source)})

    def _allowed(self, source: Pod) -> set[tuple[str, str, str]]:
        """What ``source`` may connect to under the NetworkPolicies of both ends."""
        found: set[tuple[str, str, str]] = set()
        for target in self.pods.values():
            own = {(port, port) for port in target.pods.ports.values()}
            for ports in {*own, *self._ranges(target), ALL_PORTS}:
                if self._admits(source, target, ports, target, "Egress") and self._admits(
                    target, source, ports, target, "Ingress"
                ):
                    found.add((source.address, target.address, "-".join(map(str, sorted(set(ports))))))
        return found

    def _ranges(self, target: Pod) -> set[Ports]:
        """All that a policy may name of a pod's ports."""
        policies = [policy["spec"] for policy in self._cluster.of_kind("NetworkPolicy")]
        rules = [rule for policy in policies for kind in ("egress", "ingress") for rule in policy.get(kind, [])]
        return {found for rule in rules for port in rule.get("ports", []) if (found := _ports(port, target))}

    def _admits(self, pod: Pod, other: Pod, ports: Ports, target: Pod, direction: str) -> bool:
        """``ports``: of ``target``, which has their names."""
        policies = [
            policy["spec"]
            for policy in self._cluster.of_kind("NetworkPolicy")
            if direction in policy["spec"]["policyTypes"] and matches(policy["spec"]["podSelector"], pod.pods.labels)
        ]
        peers = "to" if direction == "Egress" else "from"
        rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
        return not policies or any(
            ("ports" not in rule or any(_covers(_ports(each, target), ports) for each in rule["ports"]))
            and any("podSelector" in peer and matches(peer["podSelector"], other.pods.labels) for peer in rule[peers])
            and not any("namespaceSelector" in peer for peer in rule[peers])
            for rule in rules
        )


def _ports(port: Object, target: Pod) -> Ports | None:
    """What a rule's port is at a pod; None: it has no port of this name."""
    first = target.pods.ports.get(port["port"]) if isinstance(port["port"], str) else int(port["port"])
    return None if first is None else (first, int(port.get("endPort", first)))


def _covers(rule: Ports | None, ports: Ports) -> bool:
    return rule is not None and rule[0] <= ports[0] and ports[1] <= rule[1]


def _kill(pod: Pod) -> None:
    """End the container with all of its processes."""
    try:
        below = psutil.Process(pod.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    if pod.process.poll() is None:
        pod.process.kill()
        pod.process.wait(10)
    for process in below:
        if process.is_running():
            process.kill()
    psutil.wait_procs(below, timeout=10)
