"""Experts that an engine reports: only those that the learner's model can have are taken."""

import numpy as np
import pytest

from gspo_protocol.codec import Array
from gspo_protocol.messages import LeaseEnded, Refused
from gspo_protocol.messages.experts import ModelExperts, decode_experts
from gspo_services.broker.sending import recorded_batch
from tests.support.broker.ledger import LedgerHarness, chunk, delivered, replies
from tests.support.broker.ledger_leases import R1, harness

MODEL = ModelExperts(num_layers=2, top_k=3, num_experts=300)


def rows(num: int, *, of: ModelExperts = MODEL, expert: int = 0) -> Array:
    """The same expert for each of ``num`` tokens."""
    encoded: Array = np.full((num, *of.row_shape[:2]), expert, f"<u{of.row_shape[2]}").view(np.uint8)
    return encoded.reshape(num, *of.row_shape)


def told(world: LedgerHarness, model: ModelExperts | None = MODEL) -> list[Refused]:
    """The learner publishes the newest version once more, with what its engines' experts are like."""
    return replies(world.publish(1, 0, experts=model), Refused)


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (
            rows(4, of=ModelExperts(1, 1, 4)),
            r"experts have [1, 1, 1] [layers, experts per token, bytes], the model's [2, 3, 2]",
        ),
        (rows(4, of=ModelExperts(2, 3, 255)), r"experts have [2, 3, 1] [layers"),
        (rows(4, expert=300), "experts hold 300: the model has at most 300 in a layer, from 0 on"),
        (rows(4, expert=2**16 - 2), "experts hold 65534: the model"),
    ],
)
def test_experts_that_the_model_cannot_have_fail_the_attempt_and_nobody_elses(experts: Array, reason: str) -> None:
    world = harness()
    told(world)
    world.restart()  # It is known to the broker's next life, too.
    world.hello(R1)
    bad, good = world.lease(R1, 2)
    actions = world.send(R1, chunk(bad, 0, 5, 1), experts=experts)
    (refused,) = replies(actions, Refused)
    assert refused.reason.startswith(f"trajectory {bad.trajectory_id}: {reason}")
    assert [ended.trajectory_id for ended in replies(actions, LeaseEnded)] == [bad.trajectory_id]
    assert replies(world.send(R1, chunk(good, 0, 5, 1), experts=rows(4, expert=299)), Refused) == []
    assert replies(world.send(R1, chunk(good, 5, 2, 1), experts=rows(2, expert=2**16 - 1)), Refused) == [], "not known"
    assert replies(world.send(R1, chunk(good, 7, 2, 1)), Refused) == []


def test_a_batch_has_the_experts_that_were_taken() -> None:
    world = harness()
    told(world)
    while not delivered(world.request_batch(0, 1)):
        (lease,) = world.lease(R1)
        world.send(R1, chunk(lease, 0, 5, 1), experts=rows(4, expert=lease.trajectory_id))
        world.finish(R1, lease, 5, reward=float(lease.trajectory_id))
    _, arrays = recorded_batch(world.store, 0, part_tokens=100, with_experts=True).part(0)
    assert decode_experts(arrays["experts"])[:, 0, 0].tolist() == [each for each in range(4) for _ in range(4)]
    assert world.ledger.state.groups.expert_rows == {}, "of what is batched nothing is kept"


def test_a_learner_that_does_not_tell_leaves_a_trajectory_with_one_kind_of_experts() -> None:
    """Such as one of an older release."""
    world = harness()
    assert told(world, None) == []
    one, two = world.lease(R1, 2)
    assert replies(world.send(R1, chunk(one, 0, 5, 1), experts=rows(4)), Refused) == []
    assert replies(world.send(R1, chunk(two, 0, 5, 1), experts=rows(4, of=ModelExperts(1, 1, 4))), Refused) == []
    assert replies(world.send(R1, chunk(one, 5, 2, 1)), Refused) == []
    other = world.send(R1, chunk(one, 7, 2, 1), experts=rows(2, of=ModelExperts(1, 1, 4)))
    assert (
        "experts have [1, 1, 1] [layers, experts per token, bytes], those before them [2, 3, 2]"
        in replies(other, Refused)[0].reason
    )
    none = world.send(R1, chunk(two, 5, 2, 1), experts=rows(2, of=ModelExperts(1, 1, 4)))
    assert replies(none, Refused) == []


def test_a_learner_with_another_model_than_the_one_before_is_refused() -> None:
    world = harness()
    assert told(world) == told(world) == []
    assert told(world, None) == [], "one that replays none"
    (refused,) = told(world, ModelExperts(2, 3, 301))
    assert "num_experts=301), those of the versions before are ModelExperts(" in refused.reason
    assert world.ledger.state.run.experts == MODEL
