"""What a process says to one of another release: which of the two is older, and what to update first."""

from typing import Final

from protocol.limits import PROTOCOL_VERSION

ORDER: Final = "update in the order broker, learner, rollouts"
"""The broker keeps the run, and brings its ledger forward; a learner and rollouts of before wait for it and come again."""


def other_release(role: str, peer: str, version: int, own_role: str, own_version: int = PROTOCOL_VERSION) -> str:
    """The refusal of ``peer``, a ``role`` that speaks protocol ``version``, by an ``own_role``."""
    older = f"this {own_role}" if version > own_version else f"the {role} {peer}"
    return (
        f"protocol_version is {version}, this {own_role} speaks {own_version}: {older} is of the older release, update it. "
        f"All processes of a run have one release: {ORDER}"
    )
