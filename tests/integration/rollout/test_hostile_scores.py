"""A rollout goes on, and counts the attempt, whatever is returned or raised where a score is made.

In each of the five places: a function in a worker, a service, a program in a sandbox, an agent, and an environment's step.
"""

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_protocol.channels import WORK
from gspo_protocol.limits import MAX_REWARD
from gspo_protocol.messages import Finish, Lease, Release
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions
from tests.simulation.bugs.planting import Bug, planted
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.episodes import a_new_lease
from tests.support.processes.running_agents import agents_starter
from tests.support.processes.running_rollout import Running
from tests.support.rewards.anything import ERRORS, STEP_PARTS, VALUES
from tests.support.rewards.hostile_environment import HostileEnvironment, printing_sandboxes
from tests.support.rewards.recipes import bodies, outputs, recipes
from tests.support.rewards.services import served
from tests.support.wire.zmq_ends import in_background, zmq_context


def said(body: bytes) -> str:
    return base64.b64encode(body).decode()


ENDINGS = (
    "SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "StopIteration", "StopAsyncIteration",
    "RecursionError", "BaseExceptionGroup", "surrogates", "in itself",
)  # fmt: skip
"""Errors that end more than a call."""
CATALOGUE = [*({"return": name} for name in sorted(VALUES)), *({"raise": name} for name in sorted(ERRORS))]
CONTROL = {"by": "reward", "recipe": {"return": "one"}}
few = settings(max_examples=2, deadline=None, suppress_health_check=[*HealthCheck])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


Hostile = Callable[[], contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture(scope="module")
def hostile(tokenizer: ChatTokenizer) -> Hostile:
    """A rollout that plays ``HostileEnvironment`` with real reward workers and a real service."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=base64.b64decode((await request.json())["body"]))

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Running]:
        pool = RewardPool(RewardPoolOptions(num_workers=1), sandboxes=printing_sandboxes())
        async with zmq_context() as context, served(answer) as url, pool:
            run = Running(context, tokenizer, WORK, drain_s=5.0, max_running=8)
            stop_id = min(tokenizer.stop_ids)
            run.engine.next_token = lambda context: stop_id
            loop = EnvironmentLoop(
                environment=HostileEnvironment(url), tokenizer=tokenizer, engine=run.engine,  # type: ignore[arg-type]
                rewards=pool, broker=run.client, may_generate=run.sync.may_generate, max_turns=3, chunk_tokens=100,
                metrics=run.metrics,
            )  # fmt: skip
            async with in_background(run.broker.serve()), asyncio.TaskGroup() as tasks:
                tasks.create_task(run.serve(loop))
                try:
                    yield run
                finally:
                    run.stop.set()

    return start


async def ends_of(run: Running, tasks: list[dict[str, Any]], failures: str) -> list[Finish | Release]:
    """How the episodes of these tasks ended, and a last one that must end well; each that failed is counted in
    ``failures``."""
    run.broker.retry_s = 0.0
    run.broker.grants_again = True
    numbers = range(1, len(tasks) + 1)
    run.broker.grant(*(lease(number, task) for number, task in zip(numbers, tasks, strict=True)))
    await run.broker.until(lambda: sum(map(len, map(run.broker.ended, numbers))) >= len(tasks))
    ends: list[Any] = [end for number in numbers for end in run.broker.ended(number)]
    assert [end.trajectory_id for end in ends] == list(numbers), "each ended once"
    failed = [end for end in ends if isinstance(end, Release)]
    assert all(end.failed and end.reason for end in failed)
    for end in ends:
        if isinstance(end, Finish):
            assert abs(sum(end.turn_rewards)) <= MAX_REWARD
    counted = sum(
        sample.value
        for metric in run.registry.collect()
        for sample in metric.samples
        if sample.name == f"gspo_rollout_{failures}_total"
    )
    # Messages without tokens, a state that does not travel: the environment's faults, and not a score's.
    assert counted >= sum(re.match("no reward|environment |agent:", end.reason) is not None for end in failed)
    assert run.count("episodes_total", outcome="failed") == len(failed)
    return ends


def lease(number: int, task: dict[str, Any]) -> Lease:
    return a_new_lease(trajectory_id=number, task=task)


async def require_goes_on(run: Running, task: dict[str, Any]) -> None:
    run.broker.grant(lease(9999, task))
    await run.broker.until(lambda: run.broker.ended(9999))
    (end,) = run.broker.ended(9999)
    assert isinstance(end, Finish), end


@pytest.mark.parametrize("by", ["step", "reward", "function", "start"])
async def test_every_value_and_every_error(hostile: Hostile, by: str) -> None:
    async with hostile() as run:
        tasks = [{"by": by, "recipe": recipe} for recipe in CATALOGUE]
        ends = await ends_of(run, tasks, "reward_failures")
        if by not in ("start", "step"):
            scored = {task["recipe"]["return"] for task, end in zip(tasks, ends, strict=True) if isinstance(end, Finish)}
            assert scored >= {"true", "one", "half", "a million", "numpy number"}
            assert not scored & {"none", "nan", "largest", "text", "int that no float holds", "signalling nan"}
        if by != "start":
            raised = [end for task, end in zip(tasks, ends, strict=True) if "raise" in task["recipe"]]
            reason = "environment step failed: " if by in ("step", "reward") else "no reward: (raised|memory): "
            assert all(isinstance(end, Release) and re.match(reason, end.reason) for end in raised)
        await require_goes_on(run, CONTROL)


@few
@given(st.lists(st.tuples(st.sampled_from(["start", *STEP_PARTS]), recipes), min_size=20, max_size=30))
async def test_any_part_of_a_step(hostile: Hostile, made: list[tuple[str, Any]]) -> None:
    async with hostile() as run:
        await ends_of(run, [{"by": by, "recipe": recipe} for by, recipe in made], "reward_failures")
        await require_goes_on(run, CONTROL)


@few
@given(st.lists(st.tuples(st.sampled_from(["function", "async function"]), recipes), min_size=20, max_size=40))
async def test_any_reward_function(hostile: Hostile, made: list[tuple[str, Any]]) -> None:
    async with hostile() as run:
        await ends_of(run, [{"by": by, "recipe": recipe} for by, recipe in made], "reward_failures")
        await require_goes_on(run, {"by": "function", "recipe": {"return": "one"}})


@few
@given(st.lists(bodies, min_size=40, max_size=60))
async def test_any_answer_of_a_service(hostile: Hostile, made: list[bytes]) -> None:
    async with hostile() as run:
        await ends_of(run, [{"by": "service", "body": said(body)} for body in made], "reward_failures")
        await require_goes_on(run, {"by": "service", "body": said(b'{"reward": 0.5}')})


expected = st.sampled_from(["1.5", "3", "yes 2", "[1.5, 2]", '{"a": [1e300]}', "1e999999", "[[1]]", '"text"'])


@few
@given(st.lists(st.tuples(outputs, expected, st.sampled_from(["", "f"])), min_size=60, max_size=80))
async def test_any_output_of_a_program_is_a_score(hostile: Hostile, made: list[tuple[bytes, str, str]]) -> None:
    """What a policy prints is its own doing: it is right or worth 0, and never a failed attempt."""
    tasks = [{"by": "program", "body": said(body), "expected": text, "function": name} for body, text, name in made]
    async with hostile() as run:
        ends = await ends_of(run, tasks, "reward_failures")
        for task, end in zip(tasks, ends, strict=True):
            # A task that expects what no function returns is at fault itself.
            assert isinstance(end, Finish) or (task["function"] and "is the result of a function" in end.reason), (task, end)
        await require_goes_on(run, {"by": "program", "body": said(b"1.50"), "expected": "1.5", "function": ""})


AGENTS = "tests.support.policy.calling_agents:asks_and_acts"


async def test_every_error_and_some_values_of_an_agent(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = [{"raise": name} for name in ("ValueError", *ENDINGS)] + [{"return": name} for name in ("half", "nan", "largest")]
    async with agents_starter(tokenizer, tmp_path)(function=AGENTS, deadline_s=120.0) as run:
        ends = await ends_of(run, [{"recipe": recipe} for recipe in made], "agent_failures")
        assert [type(end) for end in ends] == [Release] * (1 + len(ENDINGS)) + [Finish, Release, Release]
        await require_goes_on(run, {"recipe": {"return": "one"}})


@few
@given(st.lists(recipes, min_size=8, max_size=12))
async def test_any_agent(tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory, made: list[Any]) -> None:
    agents = agents_starter(tokenizer, tmp_path_factory.mktemp("run"))
    async with agents(function=AGENTS, deadline_s=120.0) as run:
        await ends_of(run, [{"recipe": recipe} for recipe in made], "agent_failures")
        await require_goes_on(run, {"recipe": {"return": "one"}})


# --- the harness sees a door that is open --------------------------------------------------------------------------------


def opened(module: str, old: str, new: str) -> Bug:
    return Bug(name=f"a door in {module} is open", module=f"gspo_services.{module}", old=old, new=new, invariants=())


LOOP = opened(
    "rollout.environment_loop",
    "await through_the_door(self._run(lease, trajectory), self._refused, (EpisodeFailed, EngineError))",
    "await self._run(lease, trajectory)",
)
POOL = opened(
    "tasks.environments.reward_pool",
    "await through_the_door(self._result(job, group_size), no_reward)",
    "await self._result(job, group_size)",
)
OPEN: dict[str, tuple[list[Bug], dict[str, Any]]] = {
    "step": ([LOOP], {"by": "reward", "recipe": {"return": "nan"}}),
    "function": ([LOOP, POOL], {"by": "function", "recipe": {"return": "huge components"}}),
    "service": (
        [
            LOOP,
            POOL,
            opened(
                "tasks.environments.reward_service",
                "except (UnansweredError, UnreadableError, UnscoredError) as error",
                "except (UnansweredError, UnreadableError) as error",
            ),
        ],
        {"by": "service", "body": said(b'{"reward": {"a": 1e308, "b": 1e308}}')},
    ),
    "program": (
        [
            LOOP,
            POOL,
            opened("tasks.environments.programs.runs", "return self._is_expected(run)\n        except TaskFault:", "return "
            "self._is_expected(run)\n        except Exception:"),
            opened(
                "tasks.environments.programs.comparison",
                "with decimal.localcontext(_EXACT_ENOUGH):",
                "with decimal.localcontext(decimal.DefaultContext):",
            ),
        ],
        {"by": "program", "body": said(b"99e999999"), "expected": "1.5", "function": ""},
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", OPEN)
async def test_where_a_door_is_open_one_score_ends_the_rollout(hostile: Hostile, place: str) -> None:
    bugs, task = OPEN[place]
    with contextlib.ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(planted(bug))
        with pytest.raises(BaseExceptionGroup):
            async with hostile() as run:
                await ends_of(run, [task], "reward_failures")
    async with hostile() as run:
        await ends_of(run, [task], "reward_failures")


async def test_where_the_agents_door_is_open_one_score_ends_the_rollout(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    agents = agents_starter(tokenizer, tmp_path)
    bugs = [
        opened(
            "rollout.agents.runner",
            "await through_the_door(self._run(lease, calls), self._refused, (EpisodeFailed, EngineError))",
            "await self._run(lease, calls)",
        ),
        opened("tasks.agents.results", "except Exception as error:", "except KeyError as error:"),
    ]
    with contextlib.ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(planted(bug))
        with pytest.raises(BaseExceptionGroup):
            async with agents(function=AGENTS) as run:
                await ends_of(run, [{"recipe": {"return": "huge components"}}], "agent_failures")
