"""What one end of a connection says to a peer of another release: which of the two is older.

The handshake's messages keep their fields from release to release, and ignore those that later ones add: whoever is refused
can read why, whichever of the two is older.
"""

from typing import Final

from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Hello, Refused

ORDER: Final = "update in the order broker, learner, rollouts"
"""The broker keeps the run. A learner and rollouts that it refuses end, are started again, and are admitted once updated."""


def other_release(hello: Hello, own_role: str, own_version: int = PROTOCOL_VERSION) -> Refused:
    """Refuse, as an ``own_role``, a peer with another protocol version."""
    older = f"this {own_role}" if hello.protocol_version > own_version else f"the {hello.role} {hello.peer}"
    reason = (
        f"hello: protocol_version is {hello.protocol_version}, this {own_role} speaks {own_version}: {older} is of the "
        f"older release, update it. All processes of a run have one release: {ORDER}"
    )
    return Refused(reason=reason, message_type="hello", fatal=True, protocol_version=own_version)
