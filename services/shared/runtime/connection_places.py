"""Who makes room when a server has as many connections as it takes. Pure."""

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ConnectionPlaces(Generic[Key]):
    """Connections that are worked for, and those that wait: for a request, or for the rest of one.

    Whoever waits longest, of the source that has most of those, makes room. So a source that opens connections and says
    nothing closes its own, and keeps nobody out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[Key, str] = {}
        self._waiting: dict[str, dict[Key, None]] = {}

    def come(self, key: Key, address: str) -> Key | None:
        """Take a new connection from ``address``. Returns the one to close, which may be the new one."""
        self._sources[key] = source = source_of(address)
        self._waiting.setdefault(source, {})[key] = None
        if len(self._sources) <= self._most:
            return None
        largest = max(self._waiting.values(), key=len)
        oldest = next(iter(largest))
        self.gone(oldest)
        return oldest

    def work(self, key: Key) -> None:
        """A whole request has come. What is worked for is never closed."""
        self._leave(key)

    def wait(self, key: Key) -> None:
        """The request is answered."""
        if key in self._sources:
            self._waiting.setdefault(self._sources[key], {})[key] = None

    def gone(self, key: Key) -> None:
        """The connection has ended."""
        self._leave(key)
        self._sources.pop(key, None)

    def _leave(self, key: Key) -> None:
        source = self._sources.get(key)
        if source is not None and source in self._waiting:
            self._waiting[source].pop(key, None)
            if not self._waiting[source]:
                del self._waiting[source]


def source_of(address: str) -> str:
    """The host, or the network that one host may take its addresses from (IPv6)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))
