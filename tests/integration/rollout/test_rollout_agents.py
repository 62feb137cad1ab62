"""Agents on a rollout between a scripted broker and a scripted engine: real workers, the real endpoint and client."""

import asyncio
import os
import re
import select
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_protocol.messages import Finish, Journal, LeaseRequest, Release
from gspo_services.rollout.agents.runner import AgentEpisodes
from gspo_services.rollout.rendering import create_renderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.tasks.agents import AgentFailure
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.episodes import a_new_lease, resumed
from tests.support.processes.running_agents import Agents, agents_starter


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


@pytest.fixture
def agents(tokenizer: ChatTokenizer, tmp_path: Path) -> Agents:
    return agents_starter(tokenizer, tmp_path)


def a_lease(notes: Path, trajectory_id: int = 7, **task: Any) -> Any:
    return a_new_lease(trajectory_id=trajectory_id, task={"question": "What?", "notes": str(notes), **task})


def function(name: str) -> str:
    return f"tests.support.policy.calling_agents:{name}"


async def test_an_agents_calls_and_reward_are_its_trajectory(agents: Agents, tmp_path: Path) -> None:
    async with agents(function=function("two_questions"), weights={"first": 1.0, "second": 0.5}) as run:
        run.broker.grant(*(a_lease(tmp_path / str(each), trajectory_id=each) for each in (1, 2, 3)))
        await run.broker.until(lambda: len(run.broker.of(Finish)) == 3)
        for finish in run.broker.of(Finish):
            assert finish.reason == "done"
            assert len(finish.turn_rewards) == 2, "two calls"
            assert set(finish.components) == {"first", "second"}
            expected = finish.components["first"] + 0.5 * finish.components["second"]
            assert finish.turn_rewards == [0.0, pytest.approx(expected)]
            segments = [segment for chunk, _ in run.broker.chunks[finish.trajectory_id] for segment in chunk.segments]
            assert {segment.sequence for segment in segments} == {0, 1}, "the second question is another conversation"
    assert run.count("episodes_total", outcome="done") == 3
    assert run.count("endpoint_calls_total", status="200") == 6


async def test_a_plain_function_is_an_agent(agents: Agents, tmp_path: Path) -> None:
    async with agents(function=function("plain_question")) as run:
        run.broker.grant(a_lease(tmp_path / "notes"))
        finish = await run.broker.expect(Finish)
        assert finish.turn_rewards == [1.0]


async def test_each_answer_may_have_a_reward_of_its_own(agents: Agents, tmp_path: Path) -> None:
    async with agents(function=function("questions_with_rewards"), weights={"all": 2.0}) as run:
        run.broker.grant(a_lease(tmp_path / "notes"))
        finish = await run.broker.expect(Finish)
    assert (finish.turn_rewards, finish.components) == ([0.25, 0.0, 2.5], {"all": 1.0})


async def test_an_agent_plays_the_roles_of_its_configuration_each_with_its_reward(agents: Agents, tmp_path: Path) -> None:
    async with agents(function=function("each_role"), roles=["black", "red", "white"]) as run:
        run.broker.grant(a_lease(tmp_path / "notes"))
        finish = await run.broker.expect(Finish)
    assert (finish.turn_roles, finish.turn_rewards) == ([0, 1, 2], [0.0, 1.0, 2.0])
    assert finish.components == {"black": 0.0, "red": 1.0, "white": 2.0}


async def test_a_repeated_episode_calls_no_engine_and_repeats_no_side_effect(agents: Agents, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with agents(function=function("two_questions")) as run:
        run.broker.grant(a_lease(notes))
        first = await run.broker.expect(Finish)
    chunks = run.broker.chunks[7]
    entries = [message.entry for message in run.broker.of(Journal)]
    async with agents(function=function("two_questions")) as run:
        run.broker.leases.append(resumed(a_lease(notes), chunks, entries))
        again = await run.broker.expect(Finish)
        assert run.engine.requests == []
    assert (again.turn_rewards, again.num_tokens) == (first.turn_rewards, first.num_tokens)
    assert notes.read_text() == "looked\n"
    assert (run.count("agent_calls_replayed_total"), run.count("agent_divergences_total")) == (2, 0)


async def test_without_replay_a_cut_off_episode_fails(agents: Agents, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with agents(function=function("two_questions")) as run:
        run.broker.grant(a_lease(notes))
        await run.broker.expect(Finish)
    entries = [message.entry for message in run.broker.of(Journal)]
    continued = resumed(a_lease(notes), run.broker.chunks[7], entries)
    async with agents(function=function("two_questions"), on_replay="fail") as run:
        run.broker.leases.append(continued)
        release = await run.broker.expect(Release)
    assert (release.failed, "agent.on_replay" in release.reason) == (True, True)
    assert notes.read_text() == "looked\n"


async def test_a_stop_hands_back_what_an_agent_has_and_ends_the_agent(agents: Agents, tmp_path: Path) -> None:
    async with agents(function=function("asks_and_waits"), drain_s=2.0) as run:
        run.broker.grant(a_lease(tmp_path / "notes"))
        await run.broker.until(lambda: 7 in run.broker.chunks and run.count("endpoint_calls_total", status="200"))
        run.stop.set()
        release = await run.broker.expect(Release)
    assert (release.reason, release.failed) == ("draining", False)
    assert sum(chunk.num_tokens for chunk, _ in run.broker.chunks[7]) > 6
    assert run.count("episodes_total", outcome="handed_back") == 1


async def test_an_agent_whose_call_is_cut_off_by_a_stop_has_not_failed(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, count = asyncio.Event(), AgentEpisodes._count

    def counted(episodes: AgentEpisodes, reason: AgentFailure | None) -> None:
        failed.set()
        count(episodes, reason)

    monkeypatch.setattr(AgentEpisodes, "_count", counted)
    async with agents(function=function("two_questions"), drain_s=10.0) as run:
        run.engine.stops_when_told = True
        stop_generating = run.engine.stop_generating

        async def once_the_agent_has_failed() -> None:
            await failed.wait()
            await stop_generating()

        # Its call is refused before the engine is told to end.
        monkeypatch.setattr(run.engine, "stop_generating", once_the_agent_has_failed)
        prompt = create_renderer(run.tokenizer).prompt_ids(
            [{"role": "user", "content": text} for text in ("first", "What?")]
        )
        hold = run.engine.hold_at(len(prompt) + 2)
        run.broker.grant(a_lease(tmp_path / "notes"))
        await hold.reached.wait()
        run.stop.set()
        release = await run.broker.expect(Release)
    assert (release.reason, release.failed) == ("draining", False)
    assert sum(chunk.num_tokens for chunk, _ in run.broker.chunks[7]) == len(prompt) + 2, "what the engine had made"


@pytest.mark.parametrize(
    ("do", "reason", "failure"),
    [
        ("raise", "agent: raised: .*KeyError.*the user's own mistake", "raised"),
        ("nan", "agent: not_finite: .*nan", "not_finite"),
        ("text", "agent: not_finite: .*good", "not_finite"),
        ("many", r"agent: bad_component: .*16 allowed", "bad_component"),
        ("huge", "agent: not_finite: .*allowed", "not_finite"),
        ("turns", "agent: wrong_turns: it rewards 2 turns .* the policy answered 1 times", "wrong_turns"),
        ("wait", "agent: deadline: not done after 3.0 s", "deadline"),
    ],
)
async def test_what_is_no_reward_fails_the_attempt(
    agents: Agents, tmp_path: Path, do: str, reason: str, failure: str
) -> None:
    # Only the one that waits shall meet its deadline, however busy the machine is.
    async with agents(function=function("misbehaves"), deadline_s=3.0 if do == "wait" else 60.0) as run:
        run.broker.retry_s = 0.0
        run.broker.grant(a_lease(tmp_path / "notes", do=do))
        release = await run.broker.expect(Release)
        assert release.failed
        assert re.search(reason, release.reason, re.DOTALL), release.reason
        assert run.count("agent_failures_total", failure=failure) == 1
        run.broker.grant(a_lease(tmp_path / "notes", 8, do="call with n=8"))
        finish = await run.broker.expect(Finish)
    assert finish.components == {"refused": 1.0}, "the next episode is served"


async def test_who_ends_with_a_worker_that_others_shared_has_not_failed_until_it_ends_its_own(
    agents: Agents, tmp_path: Path
) -> None:
    async with agents(function=function("beside_a_killer")) as run:
        run.broker.retry_s = 0.0
        for spared in (1, 2):
            run.broker.grant(a_lease(tmp_path, 7, do="ask"), a_lease(tmp_path, 8, do="kill"))
            await run.broker.until(lambda many=2 * spared: len(run.broker.of(Release)) == many)
        run.broker.grant(a_lease(tmp_path, 7, do="ask"), a_lease(tmp_path, 8, do="kill"))
        finish = await run.broker.expect(Finish)
        await run.broker.until(lambda: len(run.broker.of(Release)) == 5)
    *handed_back, failed = run.broker.of(Release)
    assert [(each.failed, "others shared" in each.reason) for each in handed_back] == [(False, True)] * 4
    assert (failed.trajectory_id, failed.failed, "SIGKILL" in failed.reason) == (8, True, True)
    assert (finish.trajectory_id, finish.turn_rewards) == (7, [1.0])
    assert (run.count("episodes_total", outcome="handed_back"), run.count("episodes_total", outcome="failed")) == (4, 1)


async def test_an_episode_for_which_no_worker_starts_ends_the_rollout_and_has_not_failed(
    agents: Agents, tmp_path: Path
) -> None:
    kills = tmp_path / "kills"
    kills.touch()
    said = pytest.RaisesExc(ServiceError, match=r"agent\.function: 3 workers ended before .*SIGKILL")
    with pytest.RaisesGroup(said, flatten_subgroups=True):
        async with agents(function="tests.support.killed_agent:solve", environment={"KILLS": str(kills)}) as run:
            children = psutil.Process().children(recursive=True)
            before = [each for each in children if each.environ().get("KILLS") == str(kills)]
            assert before
            kills.write_bytes(b"xxx")
            run.broker.retry_s = 0.0  # the rollout asks before there is a lease, and its clock stands still
            # Waited for without being reaped: that is for those who started them.
            ends = [os.pidfd_open(process.pid) for process in before]
            for process in before:
                process.kill()
            for end in ends:
                await asyncio.to_thread(select.select, [end], [], [])
                os.close(end)
            await run.broker.expect(LeaseRequest)
            run.broker.grant(a_lease(tmp_path))
            await run.broker.expect(Finish)
    assert [release.failed for release in run.broker.of(Release)] in ([], [False])


async def test_too_late_may_be_a_reward_of_zero(agents: Agents, tmp_path: Path) -> None:
    async with agents(function=function("asks_and_waits"), deadline_s=2.0, on_deadline="zero") as run:
        run.broker.grant(a_lease(tmp_path / "notes"))
        finish = await run.broker.expect(Finish)
    assert (finish.reason, finish.turn_rewards) == ("length", [0.0])


async def test_an_agent_that_never_calls_has_nothing_to_train_on(agents: Agents, tmp_path: Path) -> None:
    async with agents(function=function("says_nothing")) as run:
        run.broker.grant(a_lease(tmp_path / "notes"))
        release = await run.broker.expect(Release)
    assert (release.failed, "made no call" in release.reason) == (True, True)


async def test_a_function_that_is_not_there_is_said_before_anything_starts(agents: Agents) -> None:
    for name, words in (
        (function("no_such"), "no function called"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ):
        said = pytest.RaisesExc(ConfigurationError, match=f"agent.function is '{name}': .*{words}")
        with pytest.RaisesGroup(said, flatten_subgroups=True):
            async with agents(function=name):
                raise AssertionError


async def test_a_program_that_is_not_there_is_said_before_anything_starts(agents: Agents) -> None:
    for changes, words in (({"command": ["no-such-program"]}, "agent.command"), ({"python": "no-such"}, "agent.python")):
        said = pytest.RaisesExc(ConfigurationError, match=f"{words} is 'no-such.*no such program")
        with pytest.RaisesGroup(said, flatten_subgroups=True):
            async with agents(**({"function": "x:y"} if "python" in changes else {}), **changes):
                raise AssertionError
