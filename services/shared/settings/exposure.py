"""Which endpoints other hosts can reach, and what to do about unprotected ones."""

import re
from typing import Final

EVERY_ADDRESS: Final = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")
_LOOPBACK: Final = re.compile(r"127(\.\d{1,3}){3}|localhost|\[::1\]", re.IGNORECASE)

EXPOSED: Final = (
    "other hosts can reach that, and without keys anybody there can join the run; set security.keys to a directory of keys "
    "(`gspo keys DIRECTORY` makes one), or security.allow_plaintext = true if only the run's own machines reach it"
)
"""What is wrong with an unprotected endpoint, and both remedies."""


def is_private(endpoint: str) -> bool:
    """Return whether no other host can reach ``endpoint``: ipc, inproc, a loopback address, or a malformed one. With several
    addresses, separated by commas: whether no other host can reach any of them."""
    if "," in endpoint:
        return all(map(is_private, endpoint.split(",")))
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0]
    return not host or _LOOPBACK.fullmatch(host) is not None
