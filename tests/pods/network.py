"""A cluster's network on one machine: a namespace per pod, one bridge between them, NetworkPolicies enforced on it, names.

Nothing appears on the host's own interfaces: the bridge lives in a namespace of its own.
"""

import ctypes
import itertools
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")
CLONE_NEWNET: Final = 0x40000000
SUBNET: Final = "10.77.0"
_numbers = itertools.count(1)


def command(*words: str, text: str | None = None) -> None:
    """Run a command. Raises: RuntimeError with its output when it fails."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def inside(namespace: str, function: Callable[[], T]) -> T:
    """Call ``function`` in a thread inside a network namespace and return its result. Raises: what it raises.

    Threads and processes that it starts are inside too.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with Path("/run/netns", namespace).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns to {namespace}")
            results.append(function())
        # It is raised again in the caller's thread.
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class Bridge:
    """The wire between all pods of the machine, of one run or of several; use as a context manager."""

    def __init__(self) -> None:
        self._prefix = f"gp{os.getpid() % 100_000}"
        self.namespace = f"{self._prefix}-net"
        self._addresses = itertools.count(2)
        self._allowed: dict[object, set[tuple[str, str, str]]] = {}
        self._parted: set[tuple[str, str]] = set()

    def __enter__(self) -> "Bridge":
        command("ip", "netns", "add", self.namespace)
        command("ip", "-n", self.namespace, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", self.namespace, "link", "set", "br0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        command("ip", "netns", "del", self.namespace)

    def add(self) -> tuple[str, str, str]:
        """Make a connected namespace; returns its name, its port of the bridge, and its address."""
        number = next(_numbers)
        namespace, port = f"{self._prefix}-{number}", f"p{number}"
        address = f"{SUBNET}.{next(self._addresses)}"
        command("ip", "netns", "add", namespace)
        command("ip", "-n", self.namespace, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        command("ip", "-n", self.namespace, "link", "set", port, "master", "br0", "up")
        command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        command("ip", "-n", namespace, "link", "set", "eth0", "up")
        command("ip", "-n", namespace, "link", "set", "lo", "up")
        return namespace, port, address

    def allow(self, owner: object, connections: set[tuple[str, str, str]]) -> None:
        """Allow only these TCP connections of ``owner``'s pods, beside those of other owners, and their answers: (from
        address, to address, ports as nft writes them).
        """
        self._allowed[owner] = connections
        self._write()

    def part(self, first: str, second: str) -> None:
        """From now on nothing gets from one address to the other, and neither end is told."""
        self._parted |= {(first, second), (second, first)}
        self._write()

    def join(self, first: str, second: str) -> None:
        self._parted -= {(first, second), (second, first)}
        self._write()

    def _write(self) -> None:
        parted = [f"add rule bridge allowed forward ip saddr {a} ip daddr {b} drop\n" for a, b in sorted(self._parted)]
        rules = [
            f"add rule bridge allowed forward ip saddr {source} ip daddr {target} tcp dport {ports} accept\n"
            f"add rule bridge allowed forward ip saddr {target} ip daddr {source} tcp sport {ports} accept\n"
            for source, target, ports in sorted(set().union(*self._allowed.values()))
        ]
        text = (
            "add table bridge allowed\ndelete table bridge allowed\nadd table bridge allowed\n"
            "add chain bridge allowed forward { type filter hook forward priority 0; policy drop; }\n"
            "add rule bridge allowed forward ether type arp accept\n" + "".join(parted + rules)
        )
        command("ip", "netns", "exec", self.namespace, "nft", "-f", "-", text=text)


class Network:
    """The network of a run's pods; use as a context manager. A pod that comes back gets a new address, as on Kubernetes."""

    def __init__(self, hosts: Path, bridge: Bridge | None = None) -> None:
        """``hosts``: the file that becomes every pod's /etc/hosts; it is rewritten in place. ``bridge``: one that other runs
        are on as well; without it the run has one of its own.
        """
        self._hosts = hosts
        self.bridge = bridge or Bridge()
        self._owns = bridge is None
        self._pods: dict[str, tuple[str, str]] = {}

    def __enter__(self) -> "Network":
        if self._owns:
            self.bridge.__enter__()
        self._hosts.write_text("127.0.0.1 localhost\n")
        return self

    def __exit__(self, *_: object) -> None:
        for pod in list(self._pods):
            self.remove(pod)
        if self._owns:
            self.bridge.__exit__()

    def add(self, pod: str) -> str:
        """Make a connected namespace for ``pod``; returns its address."""
        namespace, port, address = self.bridge.add()
        self._pods[pod] = (namespace, port)
        return address

    def remove(self, pod: str) -> None:
        namespace, _ = self._pods.pop(pod)
        command("ip", "netns", "del", namespace)

    def namespace(self, pod: str) -> str:
        return self._pods[pod][0]

    def cut(self, pod: str) -> None:
        """From now on nothing gets in or out, and neither end is told."""
        command("ip", "-n", self.bridge.namespace, "link", "set", self._pods[pod][1], "nomaster")

    def heal(self, pod: str) -> None:
        command("ip", "-n", self.bridge.namespace, "link", "set", self._pods[pod][1], "master", "br0")

    def name(self, names: dict[str, str]) -> None:
        """Set the names of all addresses."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in sorted(names.items()))]
        self._hosts.write_text("\n".join(lines) + "\n")

    def allow(self, connections: set[tuple[str, str, str]]) -> None:
        """Allow only these TCP connections between the run's pods: (from address, to address, ports as nft writes them)."""
        self.bridge.allow(self, connections)

    def inside(self, pod: str, function: Callable[[], T]) -> T:
        """Call ``function`` in a thread inside the pod's network and return its result. Raises: what it raises."""
        return inside(self.namespace(pod), function)
