"""Deltas of a small replica."""

from gspo_services.learner.weights.delta import encode_delta
from gspo_services.learner.weights.snapshot import Delta, Snapshot
from gspo_services.rollout.weights.replica import Replica


def a_delta(base: Snapshot, snapshot: Snapshot) -> Delta:
    delta = encode_delta(base, snapshot)
    assert delta is not None
    return delta


def apply(replica: Replica, delta: Delta) -> None:
    replica.apply(delta.manifest, delta.data.tobytes())
