"""What a process says to one of another release: which of the two is older, and what to update first.

The handshake's messages have the fields that releases before had, and ignore those that later ones add: whoever is refused
can read why, whichever of the two is older.
"""

import re
from typing import Final

from gspo_protocol.limits import PROTOCOL_VERSION

ORDER: Final = "update in the order broker, learner, rollouts"
"""The broker keeps the run, and brings its ledger forward; a learner and rollouts of before wait for it and come again."""
WORKLOADS: Final = {"broker": "statefulset/broker", "learner": "statefulset/learner", "rollout": "deployment/rollout"}
"""What the manifests in deploy/k8s call the owner of a role's pods; their main container has the role's name."""
_VERSIONS: Final = re.compile(r"protocol[_ ]version (?:is )?(\d+)\D.*?(?:speaks|does not match) (\d+)", re.DOTALL)
"""The versions of the refused and the refusing end in what releases have said; those before protocol 9 say no more."""


def other_release(role: str, peer: str, version: int, own_role: str, own_version: int = PROTOCOL_VERSION) -> str:
    """The refusal of ``peer``, a ``role`` that speaks protocol ``version``, by an ``own_role``."""
    if version > own_version:
        older, update = f"this {own_role}", update_of(own_role)
    else:
        older, update = f"the {role} {peer}", update_of(role, peer)
    return (
        f"protocol_version is {version}, this {own_role} speaks {own_version}: {older} is of the older release, update it. "
        f"{update} All processes of a run have one release: {ORDER}"
    )


def update_of(role: str, peer: str = "") -> str:
    """How to update the process ``peer`` of a role: one sentence with the pod and the command."""
    if role not in WORKLOADS:
        return f"Run the gspo of the newer release in place of {peer}."
    pod = peer if role == "rollout" and peer else f"{role}-0"
    workload = WORKLOADS[role]
    return (
        f"On Kubernetes this is the pod {pod}: kubectl -n NAMESPACE set image {workload} {role}=IMAGE, with the newer "
        "release's IMAGE, or name it in the overlay's images: and kubectl apply -k OVERLAY."
    )


def advice(reason: str, role: str, peer: str, other_role: str) -> str:
    """What the refused end adds to a refusal that does not say what to update: one of a release before. Else: empty.

    ``role`` and ``peer``: of the refused end. ``other_role``: of the one that refused it.
    """
    found = _VERSIONS.search(reason)
    if found is None or ORDER in reason:
        return ""
    is_newer = int(found[1]) > int(found[2])
    older, update = (
        (f"the {other_role}", update_of(other_role)) if is_newer else (f"this {role} {peer}", update_of(role, peer))
    )
    return f": {older} is of the older release. {update} {ORDER[0].upper()}{ORDER[1:]}"
