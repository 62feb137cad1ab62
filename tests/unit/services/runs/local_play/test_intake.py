"""The intake of what is tried takes what a broker takes, and nothing else."""

from typing import Any

import msgspec
import numpy as np
import pytest

from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import Chunk, Finish, Journal, Segment, VersionRun
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.runs.local_play.intake import LocalIntake
from gspo_services.shared.settings.configuration import validated
from tests.support.episodes import a_new_lease

SETTINGS = validated({"sampling": {"max_turn_tokens": 4, "max_tokens": 8}}, "test")
OBSERVED, SAMPLED = Segment("observation", 0, 2, 0), Segment("action", 0, 1, 0)


def an_intake() -> LocalIntake:
    intake = LocalIntake(SETTINGS, vocabulary=10)
    intake.begin(a_new_lease())
    return intake


def a_chunk(*segments: Segment, offset: int = 0, token: int = 5, **fields: Any) -> tuple[Chunk, dict[str, Any]]:
    num_tokens = sum(segment.num_tokens for segment in segments)
    runs = [VersionRun(-1 if each.kind == "observation" else 1, each.num_tokens) for each in segments]
    chunk = Chunk(
        trajectory_id=7, epoch=1, offset=offset, num_tokens=num_tokens, segments=list(segments), version_runs=runs,
        state={}, **fields,
    )  # fmt: skip
    arrays = {"token_ids": np.full(num_tokens, token, np.int32), "logprobs": np.zeros(num_tokens, np.float32)}
    return chunk, arrays


FINISH = Finish(trajectory_id=7, epoch=1, num_tokens=3, reason="done", turn_rewards=[1.0])


async def test_an_episode_is_taken_and_the_next_one_begins_anew() -> None:
    intake = an_intake()
    await intake.send(*a_chunk(OBSERVED, SAMPLED))
    for place in range(2):
        await intake.send(Journal(trajectory_id=7, epoch=1, place=place, entry={"a": 1}))
    await intake.send(FINISH)
    await intake.acknowledged()
    assert (len(intake.chunks), intake.finish) == (1, FINISH)
    intake.begin(a_new_lease(trajectory_id=8))
    assert (intake.chunks, intake.finish) == ([], None)
    await intake.send(Journal(trajectory_id=8, epoch=1, place=0, entry={"a": 1}))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([a_chunk(OBSERVED, token=10)], "Chunk: token_ids hold 10: the model's vocabulary has 10 tokens"),
        ([a_chunk(SAMPLED)], "the first token is an action"),
        ([a_chunk(msgspec.structs.replace(OBSERVED, num_tokens=9))], r"9 tokens, 8 allowed \(sampling.max_tokens\)"),
        ([(Journal(trajectory_id=7, epoch=1, place=1, entry={}),)], "Journal: gap: place is 1"),
        ([(FINISH,)], "num_tokens is 3, 0 tokens are acknowledged"),
        ([a_chunk(OBSERVED, SAMPLED), (msgspec.structs.replace(FINISH, turn_rewards=[1.0, 2.0]),)], "2 turn_rewards for 1"),
    ],
)
async def test_what_a_broker_refuses_is_refused(messages: list[Any], words: str) -> None:
    intake = an_intake()
    *taken, last = messages
    for message in taken:
        await intake.send(*message)
    with pytest.raises(EpisodeFailed, match=words):
        await intake.send(*last)


async def test_what_is_no_message_is_refused_as_by_a_connection() -> None:
    chunk, arrays = a_chunk(OBSERVED, SAMPLED)
    with pytest.raises(ProtocolError):
        await an_intake().send(chunk, {**arrays, "logprobs": np.zeros(2, np.float32)})
