"""Each lease is played by the episodes of its set."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gspo_protocol.messages import GroupSampling, Lease
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.opening import EpisodesBySet, Policy, open_all_episodes, open_episodes, open_user_code
from gspo_services.rollout.rendering import Renderer, TooLongError
from gspo_services.rollout.sglang import GenerateRequest, SamplingParameters
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.settings import Settings
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.engines.scripted_engine import ScriptedEngine


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


@pytest.mark.parametrize("agent", [{}, {"function": "tests.support.trying.tried:agent", "workers": 1}])
async def test_tokens_that_the_tokenizer_does_not_have_are_counted(agent: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(save_chat_model(tmp_path / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>")))
    registry = CollectorRegistry()
    settings = Settings.model_validate(
        {"model": {"path": tmp_path / "model"}, "run": {"directory": tmp_path / "run"}, "agent": agent}
    )
    known, unknown = min(tokenizer.stop_ids), tokenizer.vocab_size - 1
    engine = ScriptedEngine(lambda context: unknown if len(context) == 1 else known, piece_tokens=1)
    policy = Policy(
        tokenizer=tokenizer, engine=engine, broker=None, may_generate=asyncio.Event(), metrics=RolloutMetrics(registry),  # type: ignore[arg-type]
        clock=MonotonicClock(), wall_s=lambda: 0.0,
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    request = GenerateRequest(
        rid="r", input_ids=[1], sampling=SamplingParameters(max_new_tokens=2, stop_token_ids=tuple(tokenizer.stop_ids))
    )
    async with (
        open_user_code(settings, "r", policy.metrics) as player,
        open_all_episodes(settings, "r", policy, player, CollectorRegistry()) as episodes,
    ):
        opened: Any = episodes
        sampled = opened._shared.engine if agent else opened.engine
        pieces = [piece async for piece in sampled.generate(request)]
    assert pieces == [piece async for piece in engine.generate(request)]
    assert [piece.token_ids.tolist() for piece in pieces] == [[unknown], [known]]
    assert registry.get_sample_value("gspo_rollout_unknown_tokens_total") == 1


async def test_agents_conversations_are_bounded_by_the_longest_sequence_of_the_run(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(save_chat_model(tmp_path / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>")))
    settings = Settings.model_validate(
        {
            "model": {"path": tmp_path / "model"}, "agent": {"url": "http://127.0.0.1:1"}, "run": {"num_batches": 9},
            "sampling": {"max_turn_tokens": 8, "max_tokens": 64},
            "schedule": {"max_tokens": {"shape": "steps", "steps": [[5, 5000]]}},
        }
    )  # fmt: skip
    seen: list[Renderer] = []
    nobody: Any = None
    policy = Policy(
        tokenizer=tokenizer, engine=nobody, broker=nobody, may_generate=asyncio.Event(), clock=MonotonicClock(),
        metrics=RolloutMetrics(CollectorRegistry()), wall_s=lambda: 0.0, watched=lambda made: seen.append(made) or made,
    )  # fmt: skip
    async with open_episodes(settings, policy, nobody, CollectorRegistry()):
        assert len(seen[0].prompt_ids([{"role": "user", "content": "1" * 4990}])) > 4990
        with pytest.raises(TooLongError):
            seen[0].prompt_ids([{"role": "user", "content": "1" * 15_000}])
