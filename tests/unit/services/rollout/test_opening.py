"""Each lease is played by the episodes of its set."""

import asyncio
from typing import Any

import pytest

from gspo_protocol.messages import GroupSampling, Lease
from gspo_services.rollout.opening import EpisodesBySet
from gspo_services.rollout.work import EpisodeFailed


class Runner:
    """Says who it is in place of an episode."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = 0

    def begin(self, lease: Lease, arrays: Any, tasks: asyncio.TaskGroup) -> Any:
        return self.name

    async def stop_generating(self) -> None:
        self.stopped += 1


def lease(of_set: str) -> Lease:
    return Lease(
        trajectory_id=1, epoch=1, group_id=1, split="eval", task={}, seed=0, lease_s=1.0, num_tokens=0, state=None,
        turn_done=False, evaluation_set=of_set, sampling=GroupSampling(1.0, 4, 8, 8),
    )  # fmt: skip


async def test_a_lease_is_played_by_its_set_and_an_unknown_one_fails_with_the_way_out() -> None:
    training, aime = Runner("training"), Runner("aime")
    episodes = EpisodesBySet(training, {"aime": aime})
    async with asyncio.TaskGroup() as tasks:
        assert [str(episodes.begin(lease(name), {}, tasks)) for name in ("", "aime")] == ["training", "aime"]
        work = episodes.begin(lease("other"), {}, tasks)
        with pytest.raises(EpisodeFailed, match=r"no evaluation.sets.other, but the broker has: start both with the same"):
            await work.run()
    await episodes.stop_generating()
    assert (training.stopped, aime.stopped) == (1, 1)
