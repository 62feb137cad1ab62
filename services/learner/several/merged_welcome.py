"""What several brokers say of the run when the learner comes, as one Welcome."""

from collections.abc import Sequence

from msgspec.structs import replace

from gspo_protocol.messages import Welcome


def merged_welcome(welcomes: Sequence[Welcome]) -> Welcome:
    """That of broker 0, with the newest version of the broker that was told least.

    They differ when the learner's former life ended between two messages. From that version on the learner publishes: the
    broker that lacks some versions gets all of them, and each other one only what is new to it (see ``announce``).
    No engine serves what some broker lacks. Of brokers whose versions were trained on as many batches, the newest version
    counts: other weights were published after it. ``next_batch`` is the largest, because a checkpoint of so many batches was
    saved; which one the learner has is what it resumes from, and each broker hears it.
    """
    last = min(welcomes, key=lambda welcome: (welcome.trained_batches, -welcome.policy_version))
    return replace(
        welcomes[0],
        policy_version=last.policy_version,
        trained_batches=last.trained_batches,
        weights_digest=last.weights_digest,
        weights_endpoint=last.weights_endpoint,
        next_batch=max(welcome.next_batch for welcome in welcomes),
    )
