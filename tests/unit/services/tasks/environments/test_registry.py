"""An environment by its name or its import path, with checked options."""

import subprocess
import sys
from pathlib import Path

import pytest

from gspo.tasks.environments import Environment, Split, Start, State, Step, Task, TaskSet, TaskSource
from gspo_services.tasks.environments.arithmetic import Arithmetic
from gspo_services.tasks.environments.registry import (
    ENVIRONMENTS,
    TASK_SETS,
    create_environment,
    create_task_set,
    find_environment,
    find_task_set,
)

HERE = "tests.unit.services.tasks.environments.test_registry"


class Echo(Environment):
    """The smallest possible environment."""

    def tasks(self, split: Split) -> TaskSource:
        raise NotImplementedError

    def start(self, task: Task, seed: int) -> Start:
        return Start(state={}, messages=[{"role": "user", "content": "say hello"}])

    def step(self, state: State, action: str) -> Step:
        return Step(state=state, messages=[], reward=float(action == "hello"), done=True)


class Words(TaskSet):
    """Tasks that only an agent can play."""

    def tasks(self, split: Split) -> TaskSource:
        raise NotImplementedError


@pytest.mark.parametrize("name", list(ENVIRONMENTS))
def test_every_name_leads_to_an_environment(name: str) -> None:
    assert isinstance(create_environment(name, {}), Environment)


def test_an_environment_of_the_user_is_found_by_its_import_path() -> None:
    environment = create_environment(f"{HERE}:Echo", {})
    assert environment.step({}, "hello").reward == 1.0


@pytest.mark.parametrize("name", [*ENVIRONMENTS, *TASK_SETS, f"{HERE}:Echo", f"{HERE}:Words"])
def test_an_agent_takes_the_tasks_of_any_class_that_has_some(name: str) -> None:
    assert isinstance(create_task_set(name, {}), find_task_set(name))


@pytest.mark.parametrize("name", [*TASK_SETS, f"{HERE}:Words"])
def test_tasks_alone_are_no_environment(name: str) -> None:
    with pytest.raises(ValueError, match=r"has tasks and nothing that plays them: name an agent in the section \[agent\]"):
        create_environment(name, {})


def test_options_given_as_text_are_read_as_their_type() -> None:
    environment = create_environment("arithmetic", {"num_eval_tasks": "7"})
    assert environment.tasks("eval").num_tasks == 7


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "chess",
            {},
            ["chess", "arithmetic, calculator, code, contest, dataset, math", "rows, shop", "package.module:ClassName"],
        ),
        ("no_such_package.x:Chess", {}, ["no_such_package"]),
        (f"{HERE}:Chess", {}, [HERE, "Chess"]),
        ("gspo.tasks.environments:Start", {}, ["Start"]),
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


FIND = """
import sys
from gspo_services.tasks.environments.registry import find_environment
from gspo_services.tasks.reward_worker.worker import find_function

assert not {"", sys.argv[1]} & set(sys.path), sys.path
try:
    print(find_environment("mine:Mine").__name__, find_function("mine:reward")())
except ValueError as error:
    print(error)
import this_is_of_the_project, colorsys
print(colorsys.__file__.startswith(sys.argv[1]))
"""


def found_in(project: Path, source: str) -> list[str]:
    """The lines of a process in ``project``, whose directory Python does not put on the import path."""
    (project / "mine.py").write_text(source)
    (project / "this_is_of_the_project.py").touch()
    (project / "colorsys.py").write_text("raise RuntimeError\n")
    command = [sys.executable, "-P", "-c", FIND, str(project)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_class_and_a_function_in_the_working_directory_are_found_and_hide_no_module_of_python(tmp_path: Path) -> None:
    mine = "class Mine(Environment):\n    pass\n\ndef reward():\n    return 0.5\n"
    source = f"from gspo.tasks.environments import Environment\n\n{mine}"
    assert found_in(tmp_path, source) == ["Mine 0.5", "False"]


def test_what_a_users_module_says_about_a_missing_package_is_repeated(tmp_path: Path) -> None:
    refusal, _ = found_in(tmp_path, "raise ModuleNotFoundError('install the package chess first')\n")
    assert 'environment "mine:Mine"' in refusal
    assert "install the package chess first" in refusal
