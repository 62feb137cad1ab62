"""`kubectl` for the pods of a node: the commands of docs/guide/kubernetes.md, as they are written there."""

import base64
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.deploy.cluster import Cluster, matches
from tests.pods.node import Node, Pod
from tests.pods.run import until

GUIDE: Final = Path(__file__).parents[2] / "docs" / "guide" / "kubernetes.md"
EXEC_S: Final = 300.0
START_S: Final = 400.0
KINDS: Final = {"deployment": "Deployment", "statefulset": "StatefulSet"}


def commands_of(section: str) -> dict[str, list[str]]:
    """The section's commands, by the bold word that begins the paragraph before them; empty for those before any."""
    text = GUIDE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found: dict[str, list[str]] = {}
    label = ""
    for line in text.splitlines():
        if start := re.match(r"\*\*([\w ]+)", line):
            label = start[1]
        if line.startswith("kubectl "):
            found.setdefault(label, []).append(line)
    return found


class Kubectl:
    """Carries out command lines on the pods of a node."""

    def __init__(self, node: Node, cluster: Cluster, files: Path) -> None:
        """``files``: the folder from which commands name files."""
        self._node = node
        self._cluster = cluster
        self._files = files
        self._replicas = {
            (pods.kind, pods.owner["metadata"]["name"]): pods.owner["spec"].get("replicas") for pods in cluster.pods
        }
        self._verbs: dict[str, Callable[[list[str]], str]] = {
            "exec": self._exec, "scale": self._scale, "wait": self._wait, "rollout": self._rollout,
            "delete": self._delete, "create": self._create, "apply": self._apply,
        }  # fmt: skip

    def __call__(self, line: str) -> str:
        """Returns what a command in a pod printed. Raises: AssertionError when it fails, or takes too long."""
        words = shlex.split(line.partition(" | ")[0])
        assert words.pop(0) == "kubectl"
        if words[0] == "-n":
            assert words[1] == "gspo"
            del words[:2]
        return self._verbs[words[0]](words[1:])

    def pod(self, name: str) -> Pod:
        """By its own name, or by its owner's, as in `deployment/tools`."""
        kind, _, owner = name.rpartition("/")
        pods = self._node.pods.values()
        return next(pod for pod in pods if (pod.pods.owner["metadata"]["name"] if kind else pod.name) == owner)

    def _exec(self, words: list[str]) -> str:
        target, dashes, *command = words
        assert dashes == "--"
        done = self._node.execute(self.pod(target), command, EXEC_S)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _scale(self, words: list[str]) -> str:
        *owners, option = words
        for owner in owners:
            kind, _, name = owner.partition("/")
            self._node.resize(KINDS[kind], name, int(option.removeprefix("--replicas=")))
        return ""

    def _wait(self, words: list[str]) -> str:
        assert words[:3] == ["pod", "--for=delete", "--selector"]
        key, _, values = words[3].replace(" in ", "=").partition("=")
        selector = {"matchExpressions": [{"key": key, "operator": "In", "values": re.findall(r"[\w-]+", values)}]}
        timeout_s = float(words[4].removeprefix("--timeout=").removesuffix("s"))
        gone = lambda: not any(matches(selector, pod.pods.labels) for pod in self._node.pods.values())  # noqa: E731
        until(self._node, f"end of {words[3]}", gone, timeout_s)
        return ""

    def _rollout(self, words: list[str]) -> str:
        assert words[0] == "status"
        pod = self.pod(words[1])
        ready = "readinessProbe" in pod.pods.main
        inside = lambda: os.readlink(f"/proc/{pod.process.pid}/root") != "/"  # noqa: E731
        until(self._node, f"{pod.name} to be ready", lambda: self._node.is_ready(pod) if ready else inside(), START_S)
        return ""

    def _delete(self, words: list[str]) -> str:
        assert words[0] == "pvc"
        self._node.delete_claim(words[1])
        return ""

    def _create(self, words: list[str]) -> str:
        kind, generic, name, option = words
        assert (kind, generic) == ("secret", "generic")
        path = self._files / option.removeprefix("--from-file=")
        data = {path.name: base64.b64encode(path.read_bytes()).decode()}
        self._node.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data})
        return ""

    def _apply(self, words: list[str]) -> str:
        """Nothing has changed but the replicas that `kubectl scale` set."""
        assert words[0] == "-k"
        for (kind, name), replicas in self._replicas.items():
            if replicas is not None:
                self._node.resize(kind, name, replicas)
        return ""
