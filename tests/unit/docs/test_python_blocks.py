"""Python of the documentation: what is not run by a test of its own names nothing that is not there."""

from pathlib import Path
from typing import Any, Final

import pytest

from gspo.tasks.agents import Episode
from tests.support.pages import PAGES, blocks, name_of
from tests.support.reading import UNKNOWN, Of, read

GIVEN: Final[dict[str, Any]] = {
    "episode": Of(Episode), **dict.fromkeys(("state", "program", "text", "tests"), UNKNOWN),
}  # fmt: skip
"""What a fragment finds where it stands: an agent's episode, and what a user's own code has."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_of_a_page_names_what_is_there(page: Path) -> None:
    names = GIVEN
    for block in blocks("python", pages=(page,)):
        wrong, left = read(block.text, names)
        assert wrong == [], block.place
        names = names | left


def test_examples_with_prompts_are_on_the_page_whose_test_runs_them() -> None:
    assert {block.place.partition(":")[0] for block in blocks("pycon")} == {"docs/gspo.md"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from gspo import no_such_loss", "gspo has no no_such_loss"),
        ("import gspo.no_such_module", "No module named 'gspo.no_such_module'"),
        ("from gspo import Objective\nObjective.no_such_form()", "Objective has no no_such_form"),
        ("from gspo import Objective\nobjective = Objective.gspo()\nobjective.no_such_eps", "Objective has no no_such_eps"),
        (
            "from gspo.runs import Run\nrun = Run.open('a')\nrun.trajectories(splits='a')",
            "unexpected keyword argument",
        ),
        (
            "from gspo.runs import Run\nwith Run.start('a', {}) as run:\n    run.no_such_end()",
            "Run has no no_such_end",
        ),
        ("async def solve(episode):\n    return episode.computer.no_such_run('ls')", "Computer has no no_such_run"),
        ("async def solve(episode):\n    return await episode.computer.run('ls', timeout=1)", "unexpected keyword argument"),
        ("print(no_such_name)", "no name no_such_name"),
        ("sum(each.a for each in text) + no_such_sum", "no name no_such_sum"),
    ],
)
def test_what_is_not_there_is_found(text: str, said: str) -> None:
    wrong, _ = read(text, GIVEN)
    assert len(wrong) == 1
    assert said in wrong[0]


def test_what_is_no_python_is_found() -> None:
    with pytest.raises(SyntaxError):
        read("def grade(completion task): ...", GIVEN)
