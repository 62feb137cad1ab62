"""The addresses that a client connects to: one, or those of a broker and its standbys, of which one answers."""

from typing import Final

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.endpoints import require_endpoint
from gspo_services.shared.net.security import Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import EndpointError

NEXT_ADDRESS_S: Final = 2.0
"""Seconds of silence after which the next of several addresses is tried: libzmq would try one for ever."""


class Addresses:
    """The addresses of one client, and the one in use."""

    def __init__(self, spec: ChannelSpec, endpoint: str, security: Security, clock: Clock) -> None:
        """``endpoint``: one address, or several separated by commas.

        Raises: EndpointError when one of several is malformed, or open to other hosts without keys. A single one is left to
        the socket.
        """
        self._all = tuple(dict.fromkeys(each.strip() for each in endpoint.split(",")))
        self._place = 0
        self._connected_at = clock.now()
        self._has_answered = False
        for each in self._all if len(self._all) > 1 else ():
            try:
                require_endpoint("one of its addresses", each)
            except ValueError as error:
                raise EndpointError(f"{spec.name} channel: cannot connect to {endpoint!r}: {error}") from error
            if objection := security.objection(each):
                raise EndpointError(f"{spec.name} channel: {objection}")

    @property
    def current(self) -> str:
        """The address in use."""
        return self._all[self._place]

    def next(self, now: float) -> str:
        """Return the address to connect to now; after the last one the first. A single one is used again."""
        self._place = (self._place + 1) % len(self._all)
        self._connected_at, self._has_answered = now, False
        return self.current

    def heard(self) -> None:
        """Take note that the address in use has answered."""
        self._has_answered = True

    def is_unanswered(self, now: float) -> bool:
        """Return whether another address should be tried: this one has been silent for long enough since we connected."""
        return len(self._all) > 1 and not self._has_answered and now - self._connected_at >= NEXT_ADDRESS_S
