"""What a Grade takes of each member of its group."""

import numpy as np

from gspo_protocol.codec import decode, encode
from gspo_protocol.messages import Grade, GroupMember, Segment, VersionRun
from gspo_services.broker.ledger import GrantLease
from gspo_services.broker.outgoing import grade_message
from gspo_services.broker.rows import TrajectoryRow
from gspo_services.broker.store import Payload
from tests.support.broker.ledger import SAMPLING


def payload(*segments: Segment) -> Payload:
    """Tokens 0, 1, 2, ... in these segments."""
    num_tokens = sum(segment.num_tokens for segment in segments)
    return Payload(
        token_ids=np.arange(num_tokens, dtype="<i4"), logprobs=np.zeros(num_tokens, "<f4"), segments=list(segments),
        version_runs=[VersionRun(1, num_tokens)], state=None, turn_done=True, turn_rewards=[],
    )  # fmt: skip


def test_a_grade_has_the_last_turn_that_each_member_keeps() -> None:
    members = (
        TrajectoryRow(trajectory_id=4, group_id=1, num_turns=2, turn_rewards=(0.5, 0.25), components={"right": 1.0}),
        TrajectoryRow(trajectory_id=5, group_id=1, num_turns=3, discarded_turns=(2,), turn_rewards=(1.0, 0.0, 0.0)),
    )
    observation, action = Segment("observation", 0, 2), Segment("action", 0, 3)
    first = payload(observation, action, Segment("observation", 1, 1), Segment("action", 1, 2))
    # Turn 1 goes on after another sequence began.
    beside = [Segment("observation", 2, 1, 1), Segment("action", 2, 2, 1)]
    second = payload(
        observation, action, Segment("observation", 1, 1), Segment("action", 1, 2), *beside, Segment("action", 1, 1)
    )
    grant = GrantLease(
        to=("r", "s"), trajectory_id=5, epoch=3, group_id=1, split="train", task_index=0, seed=0, sampling=SAMPLING,
        num_tokens=0, members=members,
    )  # type: ignore[arg-type]  # fmt: skip
    message, arrays = grade_message(grant, {"question": "?"}, [first, second])
    assert message == Grade(
        trajectory_id=5, epoch=3, group_id=1, task={"question": "?"},
        members=[GroupMember(num_tokens=2, reward=0.75, components={"right": 1.0}), GroupMember(num_tokens=3, reward=1.0)],
    )  # fmt: skip
    assert arrays["token_ids"].tolist() == [6, 7, 6, 7, 11]
    assert decode(encode(message, arrays)).message == message
