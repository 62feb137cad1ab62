"""What a Welcome must say before a connecting process takes it: that the other end is the one that it was told to reach."""

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.messages import Welcome
from gspo_services.shared.runtime.errors import ServiceError


def require_expected(
    welcome: Welcome,
    former: Welcome | None,
    *,
    spec: ChannelSpec,
    endpoint: str,
    fingerprint: str,
    expected: tuple[int, int] | None,
) -> None:
    """``former``: the Welcome before. ``fingerprint``: of the settings here; empty: any. ``expected``: the broker's number
    and how many there are; None: any.

    Raises: ServiceError.
    """
    if expected is not None and welcome.num_brokers != expected[1]:
        raise ServiceError(
            f"{spec.name} channel: {endpoint} is one of {welcome.num_brokers} brokers, and broker.num_brokers is "
            f"{expected[1]} here: it must be the same in every process of a run"
        )
    if expected is not None and welcome.broker != expected[0]:
        raise ServiceError(
            f"{spec.name} channel: broker.{spec.name}_endpoint of broker {expected[0]} ({endpoint}) is answered by broker "
            f"{welcome.broker}: give each broker its own endpoint, the same in every process of a run"
        )
    if fingerprint and welcome.fingerprint and welcome.fingerprint != fingerprint:
        raise ServiceError(
            f"{spec.name} channel: {endpoint} runs other settings (fingerprint {welcome.fingerprint}, here "
            f"{fingerprint}): run.seed, the model directory's name, [environment], [agent] and "
            "[batch] must be the same in every process of a run"
        )
    if former is not None and welcome.run_id != former.run_id:
        raise ServiceError(
            f"{spec.name} channel: {endpoint} serves run {welcome.run_id} now, and served {former.run_id} before: it was "
            "restored, or begun anew. What this process has is of the former run: start it again"
        )
