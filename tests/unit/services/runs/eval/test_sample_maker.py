"""Samples are taken side by side through a rollout's own code; the engine's answers are texts."""

from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest

from gspo_protocol.messages import VersionRun
from gspo_services.rollout.sglang import EngineError, GenerateRequest, OutputPiece, SamplingParameters
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.runs.eval.sample_maker import BusyEngine, open_maker
from gspo_services.runs.eval.samples import ScoredSample
from gspo_services.runs.eval.sets import open_set
from gspo_services.runs.local_play import VERSION
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings import EvaluationSet, Settings, override_settings
from tests.support.clocks import VirtualClock


class Parrot:
    """Answers with one text, and remembers how it was asked."""

    def __init__(self, tokenizer: ChatTokenizer, text: str, *, dies_after: int = 10_000) -> None:
        self._ids = [*tokenizer.encode(text), min(tokenizer.stop_ids)]
        self._left = dies_after
        self.requests: list[GenerateRequest] = []

    async def stop_generating(self) -> None:
        """Nothing lasts."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        self.requests.append(request)
        self._left -= 1
        if self._left < 0:
            raise EngineError("the server is gone")
        ids = np.array(self._ids, dtype=np.int32)
        yield OutputPiece(
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            version_runs=[VersionRun(VERSION, len(ids))],
            finish_reason="stop",
        )


def settings(directory: Path, model: Path) -> Settings:
    (directory / "logs").mkdir(exist_ok=True)
    return override_settings(
        Settings(),
        [f"run.directory={directory}", f"model.path={model}", "sampling.max_turn_tokens=20", "sampling.max_tokens=200",
         "rollout.max_running=3"],
    )  # fmt: skip


async def test_each_sample_has_its_reward_answer_text_and_seed(tmp_path: Path, chat_model: Path) -> None:
    terms = EvaluationSet(num_tasks=3, samples=2, temperature=0.6, top_p=0.9, top_k=5, max_turn_tokens=30)
    chosen = open_set(settings(tmp_path, chat_model), "a", terms)
    problem = chosen.tasks[1].task["problem"]
    right = str(eval(str(problem)))
    tokenizer = ChatTokenizer(chat_model)
    parrot, taken = Parrot(tokenizer, right), list[ScoredSample]()
    async with open_maker(chosen, tokenizer, parrot, MonotonicClock()) as maker:
        await maker.take(iter([(task, number) for number in range(2) for task in chosen.tasks]), taken.append)
    assert sorted((each.task, each.sample) for each in taken) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {each.reward for each in taken if each.task == 1} == {1.0}
    assert {(each.answer, *each.turns) for each in taken} == {(right, right)}
    assert len({each.seed for each in taken}) == 6
    assert {each.num_action_tokens for each in taken} == {len(parrot._ids)}
    sampling = parrot.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.6, 0.9, 5, 30)
    again = Parrot(tokenizer, right)
    async with open_maker(chosen, tokenizer, again, MonotonicClock()) as maker:
        second: list[ScoredSample] = []
        await maker.take(iter([(chosen.tasks[1], 1)]), second.append)
    assert second[0].seed == next(each.seed for each in taken if (each.task, each.sample) == (1, 1))


async def test_the_end_of_the_engine_ends_the_sampling_and_keeps_what_was_taken(tmp_path: Path, chat_model: Path) -> None:
    chosen = open_set(settings(tmp_path, chat_model), "a", EvaluationSet(num_tasks=9))
    tokenizer, taken = ChatTokenizer(chat_model), list[ScoredSample]()
    async with open_maker(chosen, tokenizer, Parrot(tokenizer, "1", dies_after=4), MonotonicClock()) as maker:
        with pytest.raises(ServiceError, match="the engine failed: the server is gone"):
            await maker.take(iter([(task, 0) for task in chosen.tasks]), taken.append)
    assert len(taken) == 4


async def test_an_environment_that_fails_costs_its_samples_their_reward_and_nothing_else(
    tmp_path: Path, chat_model: Path
) -> None:
    of_user = override_settings(
        settings(tmp_path, chat_model),
        ["environment.name=tests.support.trying.tried:TriedEnvironment", "environment.options.do=raise"],
    )
    chosen = open_set(of_user, "a", EvaluationSet(num_tasks=2))
    tokenizer, taken = ChatTokenizer(chat_model), list[ScoredSample]()
    parrot = Parrot(tokenizer, "hello")
    async with open_maker(chosen, tokenizer, parrot, MonotonicClock()) as maker:
        await maker.take(iter([(task, 0) for task in chosen.tasks]), taken.append)
    assert [(each.end, each.reward, each.answer) for each in taken] == [("failed", None, None)] * 2
    assert "environment step failed" in taken[0].failure
    assert len(parrot.requests) == 2 * of_user.broker.max_attempts


async def test_the_engine_is_busy_while_any_answer_is_under_way(chat_model: Path) -> None:
    tokenizer, clock = ChatTokenizer(chat_model), VirtualClock()
    engine = BusyEngine(Parrot(tokenizer, "1"), clock)
    request = GenerateRequest(rid="a", input_ids=[1], sampling=SamplingParameters(max_new_tokens=5))
    clock.advance(5)
    one = engine.generate(request)
    await anext(one)
    clock.advance(2)
    other = engine.generate(request)
    await anext(other)
    assert engine.taken_s() == 2.0
    clock.advance(1)
    await one.aclose()
    clock.advance(3)
    await other.aclose()
    clock.advance(10)
    assert engine.taken_s() == 4.0
    assert engine.taken_s() == 0.0
