"""Checks a Welcome before a connecting process accepts it, and advises on a Refused."""

from typing import Final

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Refused, Welcome
from gspo_services.shared.runtime.errors import ServiceError

WORKLOADS: Final = {"broker": "statefulset/broker", "learner": "statefulset/learner", "rollout": "deployment/rollout"}
"""What the manifests in deploy/k8s call the owner of a role's pods. The main container has the role's name."""


def require_expected(
    welcome: Welcome,
    former_run: str,
    *,
    spec: ChannelSpec,
    endpoint: str,
    fingerprint: str,
) -> None:
    """``former_run``: the run that this process has something of; empty: none. ``fingerprint``: of the settings here; empty:
    any.

    Raises: ServiceError.
    """
    if fingerprint and welcome.fingerprint and welcome.fingerprint != fingerprint:
        raise ServiceError(
            f"{spec.name} channel: {endpoint} runs other settings (fingerprint {welcome.fingerprint}, here "
            f"{fingerprint}): run.seed, the model directory's name, [environment], [agent] and "
            "[batch] must be the same in every process of a run"
        )
    if former_run and welcome.run_id != former_run:
        raise ServiceError(
            f"{spec.name} channel: {endpoint} serves run {welcome.run_id} now, and served {former_run} before: it was "
            "restored, or begun anew. What this process has is of the former run: start it again, a learner with the "
            f"run.directory of run {welcome.run_id}"
        )


def update_advice(refused: Refused, role: str, peer: str, other_role: str) -> str:
    """How to update the end that has the older release; empty if the refusal is not about releases.

    ``role`` and ``peer``: of this process. ``other_role``: of the process that refused it.
    """
    if refused.protocol_version is None:
        return ""
    older, name = (role, peer) if refused.protocol_version > PROTOCOL_VERSION else (other_role, "")
    if older not in WORKLOADS:
        return f". Run the gspo of the newer release in place of {peer}"
    # Only a rollout's pod has a name that no manifest knows, and its peer has that name.
    pod = name if older == "rollout" else f"{older}-0"
    return (
        f". On Kubernetes{f' this is the pod {pod}' if pod else ''}: kubectl -n NAMESPACE set image {WORKLOADS[older]} "
        f"{older}=IMAGE, with the newer release's IMAGE, or name it in the overlay's images: and kubectl apply -k OVERLAY"
    )
