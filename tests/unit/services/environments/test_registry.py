"""An environment by its name or its import path, with options that are checked."""

import pytest

from gspo.environments import Environment, Split, Start, State, Step, Task, TaskSource
from services.environments.arithmetic import Arithmetic
from services.environments.registry import ENVIRONMENTS, create_environment, find_environment

HERE = "tests.unit.services.environments.test_registry"


class Echo(Environment):
    """The smallest environment there can be."""

    def tasks(self, split: Split) -> TaskSource:
        raise NotImplementedError

    def start(self, task: Task, seed: int) -> Start:
        return Start(state={}, messages=[{"role": "user", "content": "say hello"}])

    def step(self, state: State, action: str) -> Step:
        return Step(state=state, messages=[], reward=float(action == "hello"), done=True)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_name_leads_to_an_environment(name: str) -> None:
    assert isinstance(create_environment(name, {}), Environment)


def test_an_environment_of_ones_own_is_found_by_its_import_path() -> None:
    environment = create_environment(f"{HERE}:Echo", {})
    assert environment.step({}, "hello").reward == 1.0


def test_options_given_as_text_are_read_as_their_type() -> None:
    environment = create_environment("arithmetic", {"num_eval_tasks": "7"})
    assert environment.tasks("eval").num_tasks == 7


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("chess", {}, ["chess", "arithmetic, calculator, dataset", "package.module:ClassName"]),
        ("no_such_package.x:Chess", {}, ["no_such_package"]),
        (f"{HERE}:Chess", {}, [HERE, "Chess"]),
        ("gspo.environments:Start", {}, ["Start"]),
        ("arithmetic", {"max_operands": 3}, ["arithmetic", "max_operands", "max_operand, operators, num_eval_tasks"]),
        (f"{HERE}:Echo", {"loud": True}, ["loud", "none"]),
        ("arithmetic", {"max_operand": 3}, ["arithmetic", "max_operand", ">= 9"]),
        ("calculator", {"max_turns": "many"}, ["calculator", "max_turns"]),
        ("arithmetic", {"operators": "+/"}, ["arithmetic", "operators"]),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(name: str, options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        create_environment(name, options)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_name_and_its_class_agree() -> None:
    assert find_environment("arithmetic") is Arithmetic
