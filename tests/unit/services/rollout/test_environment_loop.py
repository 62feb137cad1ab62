"""The environment loop: whatever is lost on the way, a resumed episode ends the same."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from gspo.tasks.environments import RewardJob
from gspo_protocol.limits import MAX_TURNS
from gspo_protocol.messages import Chunk, Journal, Segment
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang.client import EngineError, EngineRefused, EngineUnreachable
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.trajectory import Trajectory
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.tasks.environments.reward_results import RewardResult
from tests.support.builders import an_overweight
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.engines.pieces import a_piece
from tests.support.engines.scripted_engine import ScriptedEngine, some_logprob, some_token
from tests.support.episodes import (
    RecordingBroker,
    ScriptedRewards,
    Whole,
    a_new_lease,
    an_environment_loop,
    no_tokens,
    resumed,
    run_episode,
    whole,
)
from tests.support.rewards.values import GOOD, WRONG


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    return ChatTokenizer(save_chat_model(directory, chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


@pytest.fixture(scope="module")
def stop_id(tokenizer: ChatTokenizer) -> int:
    (stop,) = tokenizer.stop_ids
    return stop


def stopping_after(num_tokens: int, tokenizer: ChatTokenizer, stop: int) -> Callable[[Sequence[int]], int]:
    """Every turn has this many tokens and the stop token. A turn begins after the assistant's marker."""
    begin = tokenizer.prompt_ids([{"role": "user", "content": "x"}])[-1]

    def next_token(context: Sequence[int]) -> int:
        made = list(reversed(context)).index(begin)
        return stop if made == num_tokens else some_token(context)

    return next_token


def an_engine(tokenizer: ChatTokenizer, stop: int, *, turn: int = 6, **changes: Any) -> ScriptedEngine:
    return ScriptedEngine(stopping_after(turn, tokenizer, stop), **changes)


# --- one uninterrupted episode ----------------------------------------------------------------------------------------


async def test_one_turn_becomes_chunks_and_a_finish(tokenizer: ChatTokenizer, stop_id: int) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id, piece_tokens=3), chunk_tokens=5)
    await run_episode(loop, a_new_lease())
    broker = loop.broker
    assert isinstance(broker, RecordingBroker)
    prompt = tokenizer.prompt_ids([{"role": "user", "content": "What is 12 + 30?"}])
    sent = whole(broker.chunks)
    assert sent.token_ids[: len(prompt)] == prompt
    assert sent.kinds == [("observation", 0)] * len(prompt) + [("action", 0)] * 7
    assert sent.token_ids[-1] == stop_id
    # The prompt goes with the first tokens; the end of a turn is sent whatever its size.
    assert [chunk.num_tokens for chunk, _ in broker.chunks] == [len(prompt) + 3, 4]
    text = tokenizer.action_text(sent.token_ids[len(prompt) : -1])
    assert broker.finish.turn_rewards == [len(text) / 10]
    assert (broker.finish.reason, broker.finish.num_tokens) == ("done", len(prompt) + 7)


async def test_each_turn_is_sent_when_it_is_complete_however_large_a_chunk_may_be(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=3, chunk_tokens=1000)
    await run_episode(loop, a_new_lease())
    chunks = loop.broker.chunks  # type: ignore[attr-defined]
    assert [(chunk.turn_done, len(chunk.turn_rewards)) for chunk, _ in chunks] == [(True, 0), (True, 1), (True, 1)]
    assert [chunk.segments[-1].kind for chunk, _ in chunks] == ["action"] * 3


async def test_only_sampled_tokens_are_action_and_have_the_engines_logprobs(tokenizer: ChatTokenizer, stop_id: int) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=3)
    await run_episode(loop, a_new_lease())
    sent = whole(loop.broker.chunks)  # type: ignore[attr-defined]
    for place, (kind, _) in enumerate(sent.kinds):
        sampled = kind == "action"
        expected = np.float32(some_logprob(sent.token_ids[:place])) if sampled else 0.0
        assert sent.logprobs[place] == expected
        assert (sent.versions[place] == 1) == sampled
        assert (sent.versions[place] == -1) == (not sampled)
    actions = [turn for kind, turn in sent.kinds if kind == "action"]
    assert actions == [0] * 7 + [1] * 7 + [2] * 7


async def test_the_engine_is_asked_with_all_tokens_so_far_and_the_room_that_is_left(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    engine = an_engine(tokenizer, stop_id)
    loop = an_environment_loop(tokenizer, engine=engine, turns=2)
    await run_episode(loop, a_new_lease(max_turn_tokens=50, max_tokens=100))
    sent = whole(loop.broker.chunks)  # type: ignore[attr-defined]
    first, second = engine.requests
    assert list(second.input_ids) == sent.token_ids[: len(second.input_ids)]
    assert first.sampling.max_new_tokens == 50
    assert second.sampling.max_new_tokens == min(50, 100 - len(second.input_ids))
    assert (first.sampling.temperature, first.sampling.seed) == (0.7, 99)
    assert set(first.sampling.stop_token_ids) == tokenizer.stop_ids
    assert first.rid != second.rid


async def test_tokens_carry_the_version_that_made_them_across_updates(tokenizer: ChatTokenizer, stop_id: int) -> None:
    engine = an_engine(tokenizer, stop_id, piece_tokens=4)
    prompt = tokenizer.prompt_ids([{"role": "user", "content": "What is 12 + 30?"}])
    engine.versions = {len(prompt) + 2: 5, len(prompt) + 6: 6}
    loop = an_environment_loop(tokenizer, engine=engine, chunk_tokens=3)
    await run_episode(loop, a_new_lease())
    sent = whole(loop.broker.chunks)  # type: ignore[attr-defined]
    assert sent.versions == [-1] * len(prompt) + [1, 1, 5, 5, 5, 5, 6]


async def test_no_request_is_made_while_weights_are_replaced(tokenizer: ChatTokenizer, stop_id: int) -> None:
    engine, gate = an_engine(tokenizer, stop_id), asyncio.Event()
    loop = an_environment_loop(tokenizer, engine=engine, may_generate=gate)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_episode(loop, a_new_lease()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert engine.requests == []
        gate.set()
    assert len(engine.requests) == 1


# --- lengths ----------------------------------------------------------------------------------------------------------


async def test_a_turn_that_does_not_stop_is_cut_and_ends_the_episode_by_length(tokenizer: ChatTokenizer) -> None:
    loop = an_environment_loop(tokenizer, turns=3)
    await run_episode(loop, a_new_lease(max_turn_tokens=5))
    broker = loop.broker
    assert isinstance(broker, RecordingBroker)
    assert whole(broker.chunks).kinds[-5:] == [("action", 0)] * 5
    assert broker.finish.reason == "length"
    assert len(broker.finish.turn_rewards) == 1


async def test_a_cut_last_turn_counts_as_length_although_the_environment_is_done(tokenizer: ChatTokenizer) -> None:
    loop = an_environment_loop(tokenizer, turns=1)
    await run_episode(loop, a_new_lease(max_turn_tokens=5))
    assert loop.broker.finish.reason == "length"  # type: ignore[attr-defined]


async def test_an_episode_ends_when_an_observation_leaves_no_room_for_an_answer(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    unbounded = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=4)
    await run_episode(unbounded, a_new_lease())
    kinds = whole(unbounded.broker.chunks).kinds  # type: ignore[attr-defined]
    second_answer = kinds.index(("action", 1))
    for max_tokens, turns in ((second_answer, 1), (second_answer + 1, 2)):
        loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=4)
        await run_episode(loop, a_new_lease(max_tokens=max_tokens))
        finish = loop.broker.finish  # type: ignore[attr-defined]
        assert (finish.reason, len(finish.turn_rewards)) == ("length", turns)
        assert finish.num_tokens <= max_tokens


async def test_an_episode_ends_with_the_last_turn_that_a_message_can_name(tokenizer: ChatTokenizer, stop_id: int) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=4)
    await run_episode(loop, a_new_lease(), no_tokens([0.0] * (MAX_TURNS - 1)))
    finish = loop.broker.finish  # type: ignore[attr-defined]
    assert (finish.reason, len(finish.turn_rewards)) == ("length", MAX_TURNS)


async def test_a_prompt_that_leaves_no_room_is_a_failure_of_the_episode(tokenizer: ChatTokenizer) -> None:
    size = len(tokenizer.prompt_ids([{"role": "user", "content": "What is 12 + 30?"}]))
    loop = an_environment_loop(tokenizer)
    with pytest.raises(EpisodeFailed, match=f"the prompt has {size} tokens, sampling.max_tokens is {size}"):
        await run_episode(loop, a_new_lease(max_tokens=size, max_turn_tokens=2))
    await run_episode(an_environment_loop(tokenizer), a_new_lease(max_tokens=size + 1, max_turn_tokens=2))


# --- resuming ---------------------------------------------------------------------------------------------------------

EPISODES: dict[str, dict[str, Any]] = {
    "one turn": {},
    "three turns": {"turns": 3},
    "slow rewards": {"turns": 3, "slow_reward": True},
    "cut by the turn's length": {"turns": 3, "max_turn_tokens": 5},
    "cut, with a slow reward": {"turns": 3, "max_turn_tokens": 5, "slow_reward": True},
    "cut by the whole length": {"turns": 9, "max_tokens": 60},
    "single tokens": {"turns": 2, "chunk_tokens": 1},
}


@pytest.mark.parametrize("name", list(EPISODES))
async def test_an_episode_resumed_after_any_acknowledged_chunk_ends_the_same(
    name: str, tokenizer: ChatTokenizer, stop_id: int
) -> None:
    limits = {name: value for name, value in EPISODES[name].items() if name in ("max_turn_tokens", "max_tokens")}
    options = {name: value for name, value in EPISODES[name].items() if name not in limits}

    def loop() -> EnvironmentLoop:
        return an_environment_loop(
            tokenizer, engine=an_engine(tokenizer, stop_id, piece_tokens=2), **{"chunk_tokens": 2, **options}
        )

    uninterrupted = loop()
    await run_episode(uninterrupted, a_new_lease(**limits))
    reference = uninterrupted.broker
    assert isinstance(reference, RecordingBroker)
    assert len(reference.chunks) >= 3
    for num_chunks in range(len(reference.chunks) + 1):
        elsewhere = loop()
        lease, arrays = resumed(a_new_lease(**limits), reference.chunks[:num_chunks])
        await run_episode(elsewhere, lease, arrays)
        broker = elsewhere.broker
        assert isinstance(broker, RecordingBroker)
        assert whole([*reference.chunks[:num_chunks], *broker.chunks]) == whole(reference.chunks)
        assert broker.finish == msgspec.structs.replace(reference.finish, epoch=2)


@pytest.mark.parametrize("turns", [1, 3])
async def test_an_episode_handed_back_at_any_token_ends_the_same_elsewhere(
    turns: int, tokenizer: ChatTokenizer, stop_id: int
) -> None:
    """After a cancellation while the engine waits, all tokens so far can still be sent."""
    uninterrupted = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id, piece_tokens=1), turns=turns)
    await run_episode(uninterrupted, a_new_lease())
    reference = whole(uninterrupted.broker.chunks)  # type: ignore[attr-defined]
    places = [place for place, (kind, _) in enumerate(reference.kinds) if kind == "action"]
    for place in places:
        engine = an_engine(tokenizer, stop_id, piece_tokens=1)
        hold = engine.hold_at(place)
        loop = an_environment_loop(tokenizer, engine=engine, turns=turns, chunk_tokens=100)
        lease = a_new_lease()
        trajectory = Trajectory(lease, no_tokens())
        async with asyncio.TaskGroup() as tasks:
            episode = tasks.create_task(loop.run(lease, trajectory))
            await hold.reached.wait()
            episode.cancel()
        assert engine.num_closed == len(engine.requests)
        await loop.send_chunk(trajectory)
        assert whole(loop.broker.chunks).token_ids == reference.token_ids[:place]  # type: ignore[attr-defined]
        elsewhere = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=turns)
        following, arrays = resumed(lease, loop.broker.chunks)  # type: ignore[attr-defined]
        await run_episode(elsewhere, following, arrays)
        assert _both(loop, elsewhere) == reference
        assert elsewhere.broker.finish.turn_rewards == uninterrupted.broker.finish.turn_rewards  # type: ignore[attr-defined]


def _both(first: EnvironmentLoop, second: EnvironmentLoop) -> Whole:
    return whole([*first.broker.chunks, *second.broker.chunks])  # type: ignore[attr-defined]


async def test_a_chunk_that_got_no_credit_is_still_there_after_the_episode_was_cancelled(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    broker = RecordingBroker(credit=1)
    loop = an_environment_loop(
        tokenizer, engine=an_engine(tokenizer, stop_id, piece_tokens=2), broker=broker, chunk_tokens=2
    )
    lease = a_new_lease()
    trajectory = Trajectory(lease, no_tokens())
    async with asyncio.TaskGroup() as tasks:
        episode = tasks.create_task(loop.run(lease, trajectory))
        await broker.starved.wait()
        episode.cancel()
    broker.grant(1)
    await loop.send_chunk(trajectory)
    assert sum(chunk.num_tokens for chunk, _ in broker.chunks) == trajectory.num_tokens
    assert broker.chunks[1][0].offset == broker.chunks[0][0].num_tokens


async def test_all_parts_of_a_chunk_with_too_many_experts_for_one_frame_are_sent(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id))
    trajectory = Trajectory(a_new_lease(), no_tokens())
    _, arrays = an_overweight()
    trajectory.act(msgspec.structs.replace(a_piece([1] * 4000, [-1.0] * 4000, (1, 4000)), experts=arrays["experts"]))
    await loop.send_chunk(trajectory)
    assert [chunk.num_tokens for chunk, _ in loop.broker.chunks] == [3906, 94]  # type: ignore[attr-defined]


async def test_a_turn_that_was_handed_over_after_its_stop_token_is_not_continued(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id))
    await run_episode(loop, a_new_lease())
    chunks = [
        (msgspec.structs.replace(chunk, turn_done=False), arrays)
        for chunk, arrays in loop.broker.chunks  # type: ignore[attr-defined]
    ]
    elsewhere = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id))
    lease, arrays = resumed(a_new_lease(), chunks)
    await run_episode(elsewhere, lease, arrays)
    assert elsewhere.engine.requests == []  # type: ignore[attr-defined]
    assert elsewhere.broker.messages == [  # type: ignore[attr-defined]
        msgspec.structs.replace(loop.broker.finish, epoch=2)  # type: ignore[attr-defined]
    ]


async def test_a_chunk_carries_the_state_before_the_last_step(tokenizer: ChatTokenizer, stop_id: int) -> None:
    """The environment of this test changes its state in place; states that were sent before must not change with it."""
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=2)
    await run_episode(loop, a_new_lease())
    chunks = loop.broker.chunks  # type: ignore[attr-defined]
    states, state = [], None
    for chunk, _ in chunks:
        state = state if chunk.state is None else chunk.state
        states.append((chunk.turn_done, state["turn"]))
    assert (states[0], states[-1]) == ((False, 0), (True, 1))
    assert [len(chunk.turn_rewards) for chunk, _ in chunks].count(1) == 1, "each turn's reward travels once"


async def test_a_slow_reward_is_waited_for_with_everything_sent(tokenizer: ChatTokenizer, stop_id: int) -> None:
    class WatchingRewards(ScriptedRewards):
        async def grade(self, job: Any) -> Any:
            sent.append(sum(chunk.num_tokens for chunk, _ in broker.chunks))
            assert broker.chunks[-1][0].turn_done
            return await super().grade(job)

    sent: list[int] = []
    broker = RecordingBroker()
    loop = an_environment_loop(
        tokenizer, engine=an_engine(tokenizer, stop_id), broker=broker, rewards=WatchingRewards(), slow_reward=True
    )
    trajectory = await run_episode(loop, a_new_lease())
    assert sent == [trajectory.num_tokens]


async def test_components_of_a_reward_are_those_of_all_turns_wherever_the_episode_goes_on(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    def loop() -> EnvironmentLoop:
        rewards = ScriptedRewards()
        rewards.components = True
        return an_environment_loop(
            tokenizer, engine=an_engine(tokenizer, stop_id), rewards=rewards, slow_reward=True, turns=3
        )

    uninterrupted = loop()
    await run_episode(uninterrupted, a_new_lease())
    reference = uninterrupted.broker
    assert isinstance(reference, RecordingBroker)
    assert reference.finish.components == {"length": pytest.approx(sum(reference.finish.turn_rewards)), "once": 3.0}
    kinds = [type(message) for message in reference.messages]
    assert kinds.count(Journal) == 3
    for end in range(1, len(kinds)):
        sent = reference.messages[:end]
        entries = [message.entry for message in sent if isinstance(message, Journal)]
        elsewhere = loop()
        await run_episode(elsewhere, *resumed(a_new_lease(), reference.chunks[: kinds[:end].count(Chunk)], entries))
        broker = elsewhere.broker
        assert isinstance(broker, RecordingBroker)
        assert broker.finish.components == reference.finish.components
        places = [message.place for message in broker.messages if isinstance(message, Journal)]
        assert places == list(range(len(entries), len(entries) + len(places)))


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_missing_reward_fails_the_episode_and_is_never_zero(tokenizer: ChatTokenizer, stop_id: int) -> None:
    rewards = ScriptedRewards()
    rewards.failure = "deadline"
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), rewards=rewards, slow_reward=True)
    with pytest.raises(EpisodeFailed, match="no reward: deadline: scripted"):
        await run_episode(loop, a_new_lease())
    assert all(isinstance(message, Chunk) for message in loop.broker.messages)  # type: ignore[attr-defined]


async def test_a_reward_of_zero_for_a_missed_deadline_is_counted_as_a_failure(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    class ZeroRewards(ScriptedRewards):
        async def grade(self, job: RewardJob) -> RewardResult:
            return RewardResult(reward=0.0, failure="deadline", detail="scripted")

    registry = CollectorRegistry()
    loop = an_environment_loop(
        tokenizer, engine=an_engine(tokenizer, stop_id), rewards=ZeroRewards(), slow_reward=True,
        metrics=RolloutMetrics(registry),
    )  # fmt: skip
    await run_episode(loop, a_new_lease())
    assert isinstance(loop.broker, RecordingBroker)
    assert loop.broker.finish.turn_rewards == [0.0]
    assert registry.get_sample_value("gspo_rollout_reward_failures_total", {"failure": "deadline"}) == 1.0


async def test_a_reward_job_gets_the_task_of_its_lease(tokenizer: ChatTokenizer, stop_id: int) -> None:
    class TaskRewards(ScriptedRewards):
        async def grade(self, job: RewardJob) -> RewardResult:
            assert job.arguments["task"] == {"question": "What is 12 + 30?"}
            return await super().grade(job)

    rewards = TaskRewards()
    loop = an_environment_loop(
        tokenizer, engine=an_engine(tokenizer, stop_id), rewards=rewards, slow_reward=True, reward_with_task=True
    )
    await run_episode(loop, a_new_lease())
    assert rewards.num_graded == 1


@pytest.mark.parametrize(("value", "reward"), GOOD.values(), ids=GOOD)
async def test_the_reward_of_a_step_may_be_any_finite_number(
    value: Any, reward: float, tokenizer: ChatTokenizer, stop_id: int
) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), reward=value)
    await run_episode(loop, a_new_lease())
    assert loop.broker.finish.turn_rewards == [reward]  # type: ignore[attr-defined]


# None makes the double give a reward of its own.
NOT_NUMBERS = {name: value for name, (value, *_) in WRONG.items() if value is not None} | {"components": {"a": 1.0}}


@pytest.mark.parametrize("value", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
async def test_a_reward_of_a_step_that_is_not_a_finite_number_fails_the_episode(
    value: Any, tokenizer: ChatTokenizer, stop_id: int
) -> None:
    registry = CollectorRegistry()
    engine = an_engine(tokenizer, stop_id)
    loop = an_environment_loop(tokenizer, engine=engine, reward=value, metrics=RolloutMetrics(registry))
    with pytest.raises(
        EpisodeFailed, match=r"no reward: the reward of the environment's step is .*: expected a finite number"
    ):
        await run_episode(loop, a_new_lease())
    assert registry.get_sample_value("gspo_rollout_reward_failures_total", {"failure": "not_finite"}) == 1.0


@pytest.mark.parametrize("reward", [1e300, -1.1e6])
async def test_a_reward_that_is_too_large_to_be_trained_on_fails_the_episode(
    reward: float, tokenizer: ChatTokenizer, stop_id: int
) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), reward=reward)
    with pytest.raises(EpisodeFailed, match=r"no reward: turn_rewards has a sum .* 1e.06 allowed \(MAX_REWARD\)"):
        await run_episode(loop, a_new_lease())


async def test_rewards_that_are_too_large_together_fail_the_episode(tokenizer: ChatTokenizer, stop_id: int) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=4, reward=4e5)
    with pytest.raises(EpisodeFailed, match=r"sum of absolute values of 1.2e\+06, 1e\+06 allowed \(MAX_REWARD\)"):
        await run_episode(loop, a_new_lease())


class NamingRewards(ScriptedRewards):
    """Each turn's reward has ``per_turn`` components of new names, of this value."""

    def __init__(self, per_turn: int, value: float) -> None:
        super().__init__()
        self._per_turn = per_turn
        self._value = value

    async def grade(self, job: Any) -> Any:
        result = await super().grade(job)
        names = [f"turn{self.num_graded}.{number}" for number in range(self._per_turn)]
        return msgspec.structs.replace(result, components=dict.fromkeys(names, self._value))


async def test_sixteen_components_of_all_turns_together_are_taken(tokenizer: ChatTokenizer, stop_id: int) -> None:
    loop = an_environment_loop(
        tokenizer, engine=an_engine(tokenizer, stop_id), rewards=NamingRewards(8, 0.5), slow_reward=True, turns=2
    )
    await run_episode(loop, a_new_lease())
    assert len(loop.broker.finish.components) == 16  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rewards", "reason", "words"),
    [
        (NamingRewards(9, 0.5), "bad_component", r"18 components, 16 allowed \(MAX_COMPONENTS\)"),
        (NamingRewards(1, 1.1e6), "not_finite", r"up to 1e.06 \(MAX_REWARD\)"),
    ],
    ids=["many", "large"],
)
async def test_too_many_or_too_large_components_of_all_turns_fail_the_episode(
    rewards: NamingRewards, reason: str, words: str, tokenizer: ChatTokenizer, stop_id: int
) -> None:
    registry = CollectorRegistry()
    loop = an_environment_loop(
        tokenizer, engine=an_engine(tokenizer, stop_id), rewards=rewards, slow_reward=True, turns=2,
        metrics=RolloutMetrics(registry),
    )  # fmt: skip
    with pytest.raises(EpisodeFailed, match=f"no reward: .*{words}"):
        await run_episode(loop, a_new_lease())
    assert registry.get_sample_value("gspo_rollout_reward_failures_total", {"failure": reason}) == 1.0


async def test_an_episode_ends_with_the_last_turn_that_a_batch_of_the_run_has_room_for(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=9, max_turns=2)
    await run_episode(loop, a_new_lease())
    finish = loop.broker.finish  # type: ignore[attr-defined]
    assert (finish.reason, len(finish.turn_rewards)) == ("length", 2)


async def test_a_bug_of_an_environment_fails_its_episode_with_its_error(tokenizer: ChatTokenizer, stop_id: int) -> None:
    loop = an_environment_loop(tokenizer, engine=an_engine(tokenizer, stop_id), turns=3, fails_at_turn=1)
    with pytest.raises(EpisodeFailed, match="environment step failed: ZeroDivisionError: an environment's bug"):
        await run_episode(loop, a_new_lease())
    loop = an_environment_loop(tokenizer, start_fails=True)
    with pytest.raises(EpisodeFailed, match="environment start failed: RuntimeError: no such task"):
        await run_episode(loop, a_new_lease())


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({1, 2}, "not plain data"),
        ({1: "integer keys do not travel"}, "not plain data"),
        ("x" * 300_000, r"has 3\d+ bytes, 262144 allowed \(MAX_STATE_BYTES\)"),
    ],
)
async def test_a_state_that_cannot_travel_fails_the_episode(state: Any, words: str, tokenizer: ChatTokenizer) -> None:
    loop = an_environment_loop(tokenizer, state=state)
    with pytest.raises(EpisodeFailed, match=words):
        await run_episode(loop, a_new_lease())
    assert loop.broker.messages == []  # type: ignore[attr-defined]


async def test_a_conversation_that_the_template_refuses_fails_the_episode(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(save_chat_model(tmp_path, chat_tokenizer("{{ raise_exception('no') }}", "<|end|>")))
    with pytest.raises(EpisodeFailed, match="refuses the conversation"):
        await run_episode(an_environment_loop(tokenizer), a_new_lease())


async def test_an_aborted_generation_keeps_its_tokens_and_is_an_error_of_the_engine(
    tokenizer: ChatTokenizer, stop_id: int
) -> None:
    engine = an_engine(tokenizer, stop_id, piece_tokens=2)
    prompt = tokenizer.prompt_ids([{"role": "user", "content": "What is 12 + 30?"}])
    engine.failures[len(prompt) + 3] = "abort"
    loop = an_environment_loop(tokenizer, engine=engine, chunk_tokens=100)
    trajectory = Trajectory(a_new_lease(), no_tokens())
    with pytest.raises(EngineError, match="aborted"):
        await loop.run(a_new_lease(), trajectory)
    assert trajectory.num_unsent == len(prompt) + 3
    assert not trajectory.turn_done
    following = trajectory.next_chunk()
    assert following is not None
    assert following[0].segments == [Segment("observation", 0, len(prompt)), Segment("action", 0, 3)]


async def test_a_refused_request_fails_the_episode_and_a_lost_engine_does_not(
    tokenizer: ChatTokenizer,
) -> None:
    engine = ScriptedEngine()
    prompt = tokenizer.prompt_ids([{"role": "user", "content": "What is 12 + 30?"}])
    engine.failures[len(prompt)] = EngineRefused("/generate: 400 too long")
    with pytest.raises(EpisodeFailed, match="too long"):
        await run_episode(an_environment_loop(tokenizer, engine=engine), a_new_lease())
    engine.failures[len(prompt)] = EngineUnreachable("connection broke")
    with pytest.raises(EngineUnreachable):
        await run_episode(an_environment_loop(tokenizer, engine=engine), a_new_lease())
