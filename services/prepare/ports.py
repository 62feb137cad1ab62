"""Finds free ports for a run whose own are taken, as they are by another run on this host.

Only ports that nobody else can have been told move: endpoints on the loopback, and those of metrics, whose doctor and
Prometheus file are made from the run's settings. What moved is printed, and settings.json in the run's directory has it.

A process binds its port seconds after it was found free. Until then the run's claim keeps it from other runs.
"""

import errno
import re
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from gspo_services.broker.store import LEDGER_FILE, lock_holder
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

MOST_TRIED: Final = 2000
LAST_PORT: Final = 65535
_WEIGHTS: Final = "learner.weights_endpoint"
_LOOPBACK: Final = re.compile(r"tcp://(?P<host>127\.\d+\.\d+\.\d+|localhost|\[::1\]):(?P<port>\d+)")


@dataclass(frozen=True, kw_only=True)
class PortRange:
    """Ports in a row that one setting names by the first."""

    key: str
    host: str
    first: int
    count: int
    endpoint: bool
    """The setting is a whole endpoint, and not only a number."""

    def ports(self, first: int) -> range:
        """All of them, if the first one were ``first``."""
        return range(first, first + self.count)

    def override(self, first: int) -> str:
        """As --set takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.key}={f'tcp://{host}:' * self.endpoint}{first}"


def port_ranges(settings: Settings) -> Iterator[PortRange]:
    """The fixed ports of this run that may move."""
    broker = settings.broker
    endpoints = {"broker.work_endpoint": broker.work_endpoint, "broker.batch_endpoint": broker.batch_endpoint}
    if not settings.learner.advertised_weights_endpoint:
        endpoints[_WEIGHTS] = settings.learner.weights_endpoint
    for key, endpoint in endpoints.items():
        match = _LOOPBACK.fullmatch(endpoint)
        if match is not None:
            # Each rank serves its part of the weights, rank 0 at the first port.
            count = settings.learner.num_ranks if key == _WEIGHTS else 1
            yield PortRange(key=key, host=match["host"].strip("[]"), first=int(match["port"]), count=count, endpoint=True)
    host = settings.security.metrics_host
    for key, first, count in (
        ("broker.metrics_port", broker.metrics_port, 1),
        ("learner.metrics_port", settings.learner.metrics_port, 1),
        ("rollout.metrics_port", settings.rollout.metrics_port, settings.rollout.num_servers),
    ):
        yield PortRange(key=key, host=host, first=first, count=count, endpoint=False)


def fixed_ports(settings: Settings) -> set[int]:
    """Ports that processes of this run have on this host, and that others may have been told: they do not move."""
    movable = {each.key for each in port_ranges(settings)}
    endpoints = {
        "broker.work_endpoint": settings.broker.work_endpoint,
        "broker.batch_endpoint": settings.broker.batch_endpoint,
        _WEIGHTS: settings.learner.weights_endpoint,
    }
    agent = settings.agent.port
    agents = set(range(agent, agent + settings.rollout.num_servers)) if agent else set()
    fixed = {key: _port_of(each) for key, each in endpoints.items() if key not in movable}
    weights = fixed.pop(_WEIGHTS, 0)
    parts = set(range(weights, weights + settings.learner.num_ranks)) if weights else set()
    return agents | parts | set(fixed.values()) - {0}


def _port_of(endpoint: str) -> int:
    """0 where it names none, such as ``tcp://127.0.0.1:*``."""
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


class PortClaims:
    """Ports that this process has claimed among the runs of its host, until it closes them or ends.

    A claim is the name of a Unix socket without a file, so the kernel forgets it with the process. Such names belong to a
    network namespace, as ports do.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def claim(self, host: str, port: int) -> bool:
        """Whether the port could be bound and is this process's now."""
        if port in self._held:
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0gspo-port-{port}")
        except OSError:
            name.close()
            return False
        if not can_bind(host, port):
            name.close()
            return False
        self._held[port] = name
        return True

    def keep_only(self, ports: Collection[int]) -> None:
        """Give up all other claims."""
        for port in self._held.keys() - set(ports):
            self._held.pop(port).close()

    def close(self) -> None:
        """Give up all claims."""
        self.keep_only(())


def moved_ports(settings: Settings, claims: PortClaims) -> list[str]:
    """Overrides that give this run free ports in place of those that are taken; none when all are free.

    ``claims`` has all of its fixed ports afterwards. While a broker of this very run is alive none moves: it must be found,
    and says that the run goes on elsewhere.
    Raises: ConfigurationError when there is none in reach.
    """
    if lock_holder(settings.run.directory / LEDGER_FILE) is not None:
        return []
    free = claims.claim
    ranges = [each for each in port_ranges(settings) if each.first]
    # Whatever moves keeps clear of what this run has elsewhere.
    fixed = fixed_ports(settings)
    taken = fixed.union(*(each.ports(each.first) for each in ranges))
    overrides, own = [], set[int]()
    for each in ranges:
        ports = each.ports(each.first)
        # The ports of many rollouts may be those that another setting has.
        if not (own | fixed).isdisjoint(ports) or not all(free(each.host, port) for port in ports):
            first = _first_free(each, taken, free)
            ports = each.ports(first)
            taken.update(ports)
            overrides.append(each.override(first))
        own.update(ports)
    claims.keep_only(own)
    return overrides


def _first_free(each: PortRange, taken: set[int], free: Callable[[str, int], bool]) -> int:
    for first in range(each.first + 1, min(each.first + MOST_TRIED, LAST_PORT - each.count + 2)):
        wanted = each.ports(first)
        if not taken.intersection(wanted) and all(free(each.host, port) for port in wanted):
            return first
    raise ConfigurationError(
        f"{each.key}: port {each.first} is taken, and so are those after it: "
        f"give it another one with --set {each.override(0)[:-1]}PORT"
    )


def can_bind(host: str, port: int) -> bool:
    """Whether no other process has the port. A host that is not this one is left to who binds it: its error says more."""
    host = "0.0.0.0" if host in ("", "*") else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return True
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(address)
            tried.listen(1)
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True
