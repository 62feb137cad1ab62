"""The example agent plays against the real endpoint and the real log of its episode; only the model is scripted."""

import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry

from examples import tool_agent
from gspo.tasks.agents import Episode
from gspo_services.prepare.tiny_models.lessons import encode_conversations
from gspo_services.prepare.tiny_models.schools import renderer_of
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer
from gspo_services.rollout.endpoint import EndpointMetrics, EndpointServer
from gspo_services.rollout.episodes import EpisodeCalls, EpisodeRegistry
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.tasks.agents import RecordedStep, StepJournal
from gspo_services.tasks.environments import TOOLS, create_task_set
from gspo_services.tasks.environments.shop import solved
from gspo_services.tasks.worker.imports import find_function
from tests.support.agent_episodes import LedgerBroker, an_episode, kinds_in, sampling_of, shared_of
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.processes.run_process import REPOSITORY

TOKENIZER = build_tokenizer(tools=True)
RENDERER = renderer_of(TOKENIZER)
ASSISTANT = TOKENIZER.convert_tokens_to_ids("<|assistant|>")
SAMPLING = sampling_of(temperature=1.0, max_turn_tokens=90, max_tokens=500, max_episode_tokens=2000)
TASK: Any = {"question": "fig*7", "prices": {"fig": 38, "nut": 12}, "answer": "266"}
LOOK = '<tool_call>{"name": "look", "arguments": {"item": "fig"}}</tool_call>'
MULTIPLY = '<tool_call>{"name": "multiply", "arguments": {"a": 38, "b": 7}}</tool_call>'


def saying(*turns: str) -> ScriptedEngine:
    """A model that says these turns, one after the other, whatever it reads in between."""
    ids = [TOKENIZER.encode(turn + "<|end|>", add_special_tokens=False) for turn in turns]

    def next_token(context: Sequence[int]) -> int:
        context = list(context)
        begun = len(context) - 1 - context[::-1].index(ASSISTANT)
        token: int = ids[context.count(ASSISTANT) - 1][len(context) - begun - 1]
        return token

    return ScriptedEngine(next_token, piece_tokens=5)


@pytest.fixture(autouse=True)
async def http(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Each test has an event loop of its own, and a worker has one for all episodes."""
    async with openai.DefaultAsyncHttpxClient() as client:
        monkeypatch.setattr(tool_agent, "HTTP", client)
        yield


class Recorder:
    """A worker's record of steps, without the worker."""

    def __init__(self, journal: StepJournal) -> None:
        self._journal = journal

    async def record(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        await self._journal.record(RecordedStep(name, arguments, result), ordinal)

    def record_now(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        raise AssertionError("the agent is async")

    def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        raise AssertionError(f"step {ordinal} was {recorded} and is {name}")


async def play(calls: EpisodeCalls) -> float:
    """The reward of the agent that plays this episode."""
    registry = EpisodeRegistry("tools")
    server = EndpointServer(registry, EndpointMetrics(CollectorRegistry()))
    await server.start()
    try:
        episode = Episode(
            task=TASK, seed=1, base_url=server.base_url, api_key=registry.add(calls), model="tools",
            ends_at=time.monotonic() + 60, recorded=calls.steps.recorded,
            record=Recorder(calls.steps),
        )  # fmt: skip
        return await tool_agent.solve(episode)
    finally:
        await server.stop()


async def played(engine: ScriptedEngine, broker: LedgerBroker) -> float:
    async with an_episode(shared_of(RENDERER, broker, engine), broker.lease()) as calls:
        reward = await play(calls)
        await calls.finish(reward)
    return reward


def shown(broker: LedgerBroker) -> str:
    """All that the model has read and said, of an episode in one sequence."""
    (tokens,) = broker.sequences().values()
    return str(TOKENIZER.decode([token for _, token in tokens]))


async def test_an_episode_without_a_mistake_is_one_sequence_that_the_demonstrations_have() -> None:
    broker = LedgerBroker(SAMPLING)
    assert await played(saying(LOOK, MULTIPLY, "266"), broker) == 1.0
    (tokens,) = broker.sequences().values()
    assert kinds_in(tokens) == ["observation", "action"] * 3
    (lesson,) = encode_conversations(TOKENIZER, [solved(TASK)], TOOLS)
    assert [token for _, token in tokens] == lesson.ids
    steps = [entry["step"] for entry in broker.entries if "step" in entry]
    assert [(step["name"], step["result"]) for step in steps] == [("look", "38")]
    assert broker.finish is not None
    assert broker.finish.turn_rewards == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["266"], 1.0),
        (["?"], 0.0),
        ([LOOK, "38"], 0.0),
        ([LOOK, MULTIPLY, " 266 "], 1.0),
        ([LOOK, MULTIPLY, "266?"], 0.0),
        # No call, because it has no end: it is the answer.
        ([LOOK, MULTIPLY.removesuffix("</tool_call>")], 0.0),
        ([LOOK, MULTIPLY, LOOK, MULTIPLY], 0.0),
    ],
)
async def test_the_reward_is_for_the_right_answer_within_four_turns(turns: list[str], reward: float) -> None:
    broker = LedgerBroker(SAMPLING)
    assert await played(saying(*turns), broker) == reward
    assert broker.row.num_turns == len(turns)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('{"name": "steal", "arguments": {}}', "error: no tool steal"),
        ('{"name": "multiply", "arguments": {"a": 38}}', "error: bad arguments for multiply"),
        ('{"name": "add", "arguments": {"a": "x", "b": 7}}', "error: bad arguments for add"),
        ('{"name": "look", "arguments": {"name": "fig"}}', "error: bad arguments for look"),
        ('{"name": "look", "arguments": {"item": "hat"}}', "error: no hat"),
    ],
)
async def test_a_call_that_makes_no_sense_is_answered_and_the_model_may_go_on(call: str, said: str) -> None:
    broker = LedgerBroker(SAMPLING)
    assert await played(saying(f"<tool_call>{call}</tool_call>", LOOK, MULTIPLY, "266"), broker) == 1.0
    assert f"{call}</tool_call><|end|><|tool|>{said}<|end|><|assistant|>" in shown(broker)


@pytest.mark.parametrize("arguments", ["", "{", "[]", "7", '"item"', "null"])
async def test_arguments_that_are_no_json_object_are_answered(arguments: str) -> None:
    episode: Any = None
    assert await tool_agent.use(episode, "add", arguments) == "error: bad arguments for add"


async def test_two_calls_in_one_turn_are_both_answered() -> None:
    broker = LedgerBroker(SAMPLING)
    assert await played(saying(LOOK + MULTIPLY, "266"), broker) == 1.0
    assert "<|tool|>38<|end|><|tool|>266<|end|><|assistant|>266<|end|>" in shown(broker)


async def test_a_price_that_was_looked_up_is_not_looked_up_again_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    first, engine = LedgerBroker(SAMPLING), saying(LOOK, MULTIPLY, "266")
    async with an_episode(shared_of(RENDERER, first, engine), first.lease()) as calls:
        assert await play(calls) == 1.0

    async def gone(prices: dict[str, int], item: str) -> str:
        raise ConnectionError("the shop is closed")

    monkeypatch.setattr(tool_agent, "look", gone)
    second, silent = first.resumed(), saying()
    assert await played(silent, second) == 1.0
    assert silent.requests == []
    assert second.sequences() == first.sequences()


def test_the_configuration_names_the_agent_and_tasks_that_it_takes() -> None:
    settings = load_settings(REPOSITORY / "examples/agent.toml", environment={})
    assert inspect.getsourcefile(find_function(settings.agent.function)) == tool_agent.__file__
    tasks = create_task_set(settings.environment.name, settings.environment.options).tasks("eval")
    (lesson,) = encode_conversations(TOKENIZER, [solved(tasks.task(0))], TOOLS)
    assert len(lesson.ids) * 2 < settings.sampling.max_tokens


def test_a_copy_of_the_agent_is_found_in_the_working_directory(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "examples/tool_agent.py", tmp_path / "my_agent.py")
    code = "from gspo_services.tasks.worker.imports import find_function; print(find_function('my_agent:solve').__module__)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.stdout == "my_agent\n", done.stderr
