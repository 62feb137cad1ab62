"""What several brokers say of the run when the learner comes, as one Welcome."""

from collections.abc import Sequence

from msgspec.structs import replace

from protocol.messages import Welcome


def merged_welcome(welcomes: Sequence[Welcome]) -> Welcome:
    """That of broker 0, with the newest version that any broker has: its number and its weights are taken, whoever was told.

    ``next_batch`` is the largest: a checkpoint of so many batches was saved. Which one the learner has is what it resumes
    from, and each broker hears it. A broker that knows less than another, because the learner's former life ended between
    two messages, catches up with what it hears; see ``BrokerLine.announce``.
    """
    newest = max(welcomes, key=lambda welcome: (welcome.policy_version, welcome.trained_batches))
    return replace(
        welcomes[0],
        policy_version=newest.policy_version,
        trained_batches=newest.trained_batches,
        weights_digest=newest.weights_digest,
        weights_endpoint=newest.weights_endpoint,
        next_batch=max(welcome.next_batch for welcome in welcomes),
    )
