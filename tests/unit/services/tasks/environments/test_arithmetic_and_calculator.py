"""The generated environments: splits, rewards, turns, and teachers."""

import random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.tasks.environments import DemonstratingEnvironment, DemonstrationMessage, RewardJob, State, Step, Task
from gspo_services.tasks.environments.arithmetic import Arithmetic, ArithmeticOptions
from gspo_services.tasks.environments.calculator import Calculator, CalculatorOptions
from gspo_services.tasks.environments.generated import GeneratedTasks, split_of

ENVIRONMENTS: list[DemonstratingEnvironment] = [
    Arithmetic(ArithmeticOptions(operators="+-*")),
    Calculator(CalculatorOptions()),
]


def play(environment: DemonstratingEnvironment, messages: list[DemonstrationMessage]) -> float:
    """The return of a demonstrated episode, which must read like an episode of the environment itself."""
    task: Task = {"problem": messages[0].content.rstrip("=")}
    start = environment.start(task, seed=0)
    assert [m["content"] for m in start.messages] == [messages[0].content]
    state, total, position = start.state, 0.0, 1
    while True:
        assert (messages[position].role, messages[position].train) == ("assistant", True)
        step = environment.step(state, messages[position].content)
        assert isinstance(step.reward, float)
        total += step.reward
        shown = [(m["role"], m["content"]) for m in step.messages]
        assert shown == [(m.role, m.content) for m in messages[position + 1 : position + 1 + len(shown)]]
        state, position = step.state, position + 1 + len(shown)
        if step.done:
            assert position == len(messages)
            return total


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_same_index_gives_the_same_task_and_the_splits_are_disjoint(environment: DemonstratingEnvironment) -> None:
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    train_problems = [train.task(index)["problem"] for index in range(500)]
    assert train_problems == [environment.tasks("train").task(index)["problem"] for index in range(500)]
    assert len(set(train_problems)) > 300
    assert train.num_tasks is None
    assert held_out.num_tasks == 256
    assert not {held_out.task(index)["problem"] for index in range(256)} & set(train_problems)
    with pytest.raises(IndexError, match="task 256 does not exist"):
        held_out.task(256)


def test_the_split_of_a_problem_never_changes() -> None:
    # Fixed here, so that later code evaluates a model of today on problems that it has not seen.
    assert [problem for problem in (f"{n}+1" for n in range(20)) if split_of(problem) == "eval"] == [
        "7+1",
        "9+1",
        "10+1",
        "11+1",
        "15+1",
    ]


def test_a_generator_without_a_problem_for_the_split_says_so() -> None:
    assert split_of("0+0") == "train"
    with pytest.raises(ValueError, match="belongs to the eval split"):
        GeneratedTasks(lambda rng: "0+0", "eval", None).task(0)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_careful_teacher_is_always_right(environment: DemonstratingEnvironment) -> None:
    rng = random.Random(1)
    assert all(play(environment, environment.demonstration(rng, careful=True)) == 1.0 for _ in range(200))


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_careless_teacher_is_right_about_a_third_of_the_time_on_training_problems(
    environment: DemonstratingEnvironment,
) -> None:
    rng = random.Random(1)
    episodes = [environment.demonstration(rng, careful=False) for _ in range(1000)]
    assert 0.25 < sum(play(environment, episode) for episode in episodes) / 1000 < 0.42
    assert all(split_of(episode[0].content.rstrip("=")) == "train" for episode in episodes)


@pytest.mark.parametrize(("action", "reward"), [("19", 1.0), (" 19\n", 1.0), ("20", 0.0), ("19?", 0.0), ("", 0.0)])
def test_a_sum_is_right_or_wrong_and_over(action: str, reward: float) -> None:
    environment = Arithmetic(ArithmeticOptions())
    step = environment.step(environment.start({"problem": "12+7"}, seed=0).state, action)
    assert (step.reward, step.done, step.messages) == (reward, True, [])


def calculator_turns(actions: list[str], options: CalculatorOptions) -> list[Step]:
    environment = Calculator(options)
    state: State = environment.start({"problem": "34*57"}, seed=0).state
    steps = []
    for action in actions:
        # The state goes through the wire between turns, to a process that has never seen the episode.
        steps.append(Calculator(options).step(msgpack.unpackb(msgpack.packb(state)), action))
        state = steps[-1].state
    return steps


def test_a_call_shows_the_tools_output_and_the_answer_ends_the_episode() -> None:
    call, answer = calculator_turns(["[34*57]", "1938"], CalculatorOptions())
    assert (call.messages, call.reward, call.done) == ([{"role": "tool", "content": "1938"}], 0.0, False)
    assert (answer.messages, answer.reward, answer.done) == ([], 1.0, True)


def test_a_bad_call_is_answered_with_its_error_and_costs_what_the_options_say() -> None:
    options = CalculatorOptions(call_reward=0.1, bad_call_reward=-0.2)
    bad, good, wrong = calculator_turns(["[import os]", "[34*57]", "7"], options)
    assert bad.messages[0]["content"].startswith("error: ")
    assert [bad.reward, good.reward, wrong.reward] == [-0.2, 0.1, 0.0]


def test_a_call_in_the_last_turn_ends_the_episode_without_an_answer() -> None:
    steps = calculator_turns(["[1+1]", "[1+1]"], CalculatorOptions(max_turns=2))
    assert [(step.done, step.messages == []) for step in steps] == [(False, False), (True, True)]


@settings(deadline=None)
@given(st.text())
def test_whatever_the_policy_says_is_an_answer_with_a_finite_reward(action: str) -> None:
    for environment in ENVIRONMENTS:
        step = environment.step(environment.start({"problem": "3*4"}, seed=0).state, action)
        assert not isinstance(step.reward, RewardJob)
        assert step.reward in (0.0, 1.0)
        assert step.done == (step.messages == [])
