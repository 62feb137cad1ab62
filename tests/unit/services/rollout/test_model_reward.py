"""A real reward model scores episodes of the environment loop: what it reads, and what the reward becomes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.environments import ChatMessage, RewardJob, Start, Step
from gspo_protocol.messages import Journal
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.model_reward import ModelReward, conversation, open_model_reward
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.tasks.environments import Score, create_environment
from gspo_services.tasks.environments.reward_results import RewardResult
from gspo_services.tasks.reward_model import RewardModel, RewardModelOptions
from gspo_services.tasks.reward_model.server import serve
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.engines.scripted_engine import ScriptedEngine, some_token
from tests.support.episodes import RecordingBroker, ScriptedRewards, a_new_lease, an_environment_loop, resumed, run_episode
from tests.support.rewards.classifiers import official_score, save_classifier


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("model")
    return ChatTokenizer(save_chat_model(directory, chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


@asynccontextmanager
async def opened(saved: Path, *, weight: float = 0.5, is_all: bool = False, **options: Any) -> AsyncIterator[ModelReward]:
    """The model, whose server runs in this process."""
    chosen = RewardModelOptions(path=str(saved), owner=str(saved), **options)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(chosen, lambda said: None), name="reward-model")
        await asyncio.sleep(0)
        async with RewardModel(chosen) as model:
            assert model._child is None
            yield ModelReward(model=model, weight=weight, is_all=is_all)
        serving.cancel()


def a_loop(tokenizer: ChatTokenizer, model: ModelReward, **options: Any) -> EnvironmentLoop:
    """Each turn says six tokens and stops."""
    (stop,) = tokenizer.stop_ids
    begin = tokenizer.prompt_ids([{"role": "user", "content": "x"}])[-1]

    def next_token(context: Any) -> int:
        return stop if list(reversed(context)).index(begin) == 6 else some_token(context)

    return replace(an_environment_loop(tokenizer, engine=ScriptedEngine(next_token), **options), model=model)


async def test_the_score_of_the_whole_conversation_is_added_to_the_last_turns_reward(
    saved: Path, tokenizer: ChatTokenizer
) -> None:
    async with opened(saved) as model:
        loop = a_loop(tokenizer, model, turns=3)
        await run_episode(loop, a_new_lease())
    broker: Any = loop.broker
    finish = broker.finish
    actions = [text for state in states_of(broker) for text in state["said"]]
    assert len(actions) == 2, "the state of the last chunk holds the turns before its own"
    last = last_action(broker, tokenizer)
    conversation = "<|user|>What is 12 + 30?<|end|>"
    for turn, action in enumerate([*actions, last]):
        conversation += f"<|assistant|>{action}<|end|>" + (f"<|tool|>turn {turn}<|end|>" if turn < 2 else "")
    official = official_score(saved, conversation)
    own = [len(action) / 10 for action in [*actions, last]]
    assert finish.turn_rewards == pytest.approx([own[0], own[1], own[2] + 0.5 * official], abs=1e-4)
    assert finish.components == pytest.approx({"model": official, "environment": sum(own)}, abs=1e-4)


def states_of(broker: Any) -> list[dict[str, Any]]:
    return [chunk.state for chunk, _ in broker.chunks if chunk.state is not None][-1:]


def last_action(broker: Any, tokenizer: ChatTokenizer) -> str:
    """The text of the last turn: the last six tokens before the stop token."""
    ids = [int(token) for _, arrays in broker.chunks for token in arrays["token_ids"]]
    return tokenizer.action_text(ids[-7:-1])


async def test_without_a_reward_of_its_own_the_model_is_all(saved: Path, tokenizer: ChatTokenizer) -> None:
    async with opened(saved, weight=2.0, is_all=True) as model:
        loop = a_loop(tokenizer, model, reward=0.0)
        await run_episode(loop, a_new_lease())
    broker: Any = loop.broker
    official = official_score(saved, f"<|user|>What is 12 + 30?<|end|><|assistant|>{last_action(broker, tokenizer)}<|end|>")
    assert broker.finish.components == pytest.approx({"model": official}, abs=1e-4)
    assert broker.finish.turn_rewards == pytest.approx([2.0 * official], abs=1e-4)


async def test_a_resumed_episode_has_the_score_of_one_that_was_not(saved: Path, tokenizer: ChatTokenizer) -> None:
    async with opened(saved) as model:
        whole = a_loop(tokenizer, model, turns=3)
        await run_episode(whole, a_new_lease())
        chunks = whole.broker.chunks  # type: ignore[attr-defined]
        journal = [m.entry for m in whole.broker.messages if isinstance(m, Journal)]  # type: ignore[attr-defined]
        for length, entries in ((2, []), (len(chunks), []), (len(chunks), journal)):
            again = a_loop(tokenizer, model, turns=3)
            lease, arrays = resumed(a_new_lease(), chunks[:length], entries)
            await run_episode(again, lease, arrays)
            finish, expected = again.broker.finish, whole.broker.finish  # type: ignore[attr-defined]
            assert finish.turn_rewards == pytest.approx(expected.turn_rewards, abs=1e-4)
            assert finish.components == pytest.approx(expected.components, abs=1e-4)


async def test_a_conversation_that_is_too_long_fails_or_is_scored_in_part_and_counted(
    saved: Path, tokenizer: ChatTokenizer
) -> None:
    async with opened(saved, max_tokens=20) as model:
        loop = a_loop(tokenizer, model)
        with pytest.raises(
            EpisodeFailed, match=r"no reward of the reward model: too_large: the conversation has \d+ tokens"
        ):
            await run_episode(loop, a_new_lease())
        assert counted(loop.metrics, "too_large") == 1
    async with opened(saved, max_tokens=20, too_long="truncate") as model:
        loop = a_loop(tokenizer, model)
        await run_episode(loop, a_new_lease())
        assert (counted(loop.metrics, "truncated"), set(loop.broker.finish.components)) == (  # type: ignore[attr-defined]
            1, {"model", "environment"},
        )  # fmt: skip


def counted(metrics: RolloutMetrics, failure: str) -> float:
    return float(metrics.reward_failures.labels(failure=failure)._value.get())


async def test_a_function_that_has_no_reward_for_a_row_leaves_it_to_the_model(saved: Path, tokenizer: ChatTokenizer) -> None:
    class Nothing(ScriptedRewards):
        async def grade(self, job: RewardJob) -> RewardResult:
            return RewardResult(reward=None, failure="no_reward", detail="returned None")

    async with opened(saved, weight=1.0) as model:
        loop = a_loop(tokenizer, model, rewards=Nothing(), slow_reward=True)
        await run_episode(loop, a_new_lease())
    finish = loop.broker.finish  # type: ignore[attr-defined]
    assert finish.turn_rewards == pytest.approx([finish.components["model"]])
    alone = replace(a_loop(tokenizer, model, rewards=Nothing(), slow_reward=True), model=None, broker=RecordingBroker())
    with pytest.raises(EpisodeFailed, match="no reward: no_reward: returned None"):
        await run_episode(alone, a_new_lease())


def test_an_environment_that_returns_a_new_state_is_played_on_from_there() -> None:
    def step(state: dict[str, Any], action: str) -> Step:
        answer: ChatMessage = {"role": "tool", "content": f"{action} {state['turn']}"}
        return Step(state={"turn": state["turn"] + 1}, messages=[answer], reward=0.0, done=False)

    played = conversation(Start(state={"turn": 0}, messages=[{"role": "user", "content": "?"}]), ["a", "b", "c"], step)
    assert [each["content"] for each in played] == ["?", "a", "a 0", "b", "b 1", "c"]


async def test_named_components_stay_and_one_called_model_is_refused() -> None:
    reward = ModelReward(model=None, weight=2.0, is_all=False)  # type: ignore[arg-type]
    assert reward.added(Score(1.0, {"right": 1.0}), [], [], 0.5) == Score(2.0, {"right": 1.0, "model": 0.5})
    assert reward.added(Score(1.0, {}), [0.5], ["right"], 0.5) == Score(2.0, {"model": 0.5}), "of an earlier turn"
    with pytest.raises(ValueError, match=r'a component called "model", which is the reward model.s: rename it'):
        reward.added(Score(1.0, {"model": 1.0}), [], [], 0.5)


async def test_an_environment_without_a_reward_needs_a_model_and_others_may_have_one(saved: Path) -> None:
    bare = load_settings(None, [], {})
    with_model = load_settings(None, [f"reward.model={saved}"], {})
    needy, own = (create_environment("dataset", {"answer_column": column}) for column in ("", "answer"))
    for use in ("always", "needed", "never"):
        with pytest.raises(
            ConfigurationError, match=r'has no reward of its own, and reward.model is "": name a reward model'
        ):
            async with open_model_reward(bare, needy, use, lambda part, seconds: None):  # type: ignore[arg-type]
                raise AssertionError("it has opened")
    for environment, use in ((own, "needed"), (own, "never"), (needy, "never")):
        async with open_model_reward(with_model, environment, use, lambda part, seconds: None) as opened:  # type: ignore[arg-type]
            assert opened is None
