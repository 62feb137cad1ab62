"""What a check says about dynamic sampling, tasks that rest, and ladders."""

from typing import Any

import pytest

from tests.support.checking.projects import Project


def texts(project: Project, check: str, *, code: bool = False, **keys: Any) -> list[str]:
    project.keys |= {f"data.{key}": value for key, value in keys.items()}
    return [f"{each.status}: {each.text}" for each in project.findings(code=code) if each.check == check]


def test_what_dynamic_sampling_may_cost_is_noted(project: Project) -> None:
    assert not texts(project, "dynamic sampling")
    (text,) = texts(project, "dynamic sampling", dynamic_sampling=True, max_filtered=1.5)
    assert text.startswith("note: while a batch of 8 groups fills, up to 12 with zero advantage are filtered out")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ({"max_filtered": 3.0}, "note: data.max_filtered: data.dynamic_sampling is false"),
        ({"rest_batches": 3}, "note: data.rest_batches: data.rest_after_groups is 0"),
    ],
)
def test_settings_without_what_they_are_for_are_unused(project: Project, key: dict[str, Any], text: str) -> None:
    assert texts(project, "unused", **key) == [text]


def test_few_tasks_may_all_rest_at_once(project: Project) -> None:
    (text,) = texts(project, "resting tasks", code=True, rest_after_groups=2, rest_batches=4)
    assert text.startswith("warn: a task rests for 4 batches of 8 groups, and there are only 32 tasks")


def test_many_tasks_may_rest(project: Project) -> None:
    assert not texts(project, "resting tasks", code=True, rest_after_groups=2, rest_batches=3)


def test_tasks_without_end_never_rest(project: Project) -> None:
    project.keys |= {"environment.name": "arithmetic", "environment.options": {}}
    (text,) = texts(project, "resting tasks", code=True, rest_after_groups=2)
    assert text.startswith("warn: data.rest_after_groups is set, and the tasks have no end")


LADDERS = """
from gspo.tasks.ladders import Ladder, LadderTasks
from gspo_services.tasks.environments.arithmetic import Arithmetic

class Climbing(LadderTasks):
    def draw(self, ladder, level, index):
        return {"problem": f"{level} + {index} =", "answer": str(level + index)}

class Sums(Arithmetic):
    def tasks(self, split):
        return Climbing([LADDERS]) if split == "train" else super().tasks(split)
"""
EASY = 'Ladder(name="easy", last_level=3, num_groups=4)'


def climb(project: Project, ladders: str) -> None:
    module = f"{project.module}_levels"
    (project.folder / f"{module}.py").write_text(LADDERS.replace("LADDERS])", f"{ladders}])"))
    project.keys |= {"environment.name": f"{module}:Sums", "environment.options": {}}


def test_the_levels_of_ladders_and_their_rules_are_shown(project: Project) -> None:
    hard = 'Ladder(name="hard", first_level=2, last_level=5, num_groups=4)'
    late = 'Ladder(name="late", last_level=1, raise_at=0.5, lower_at=0.2, num_groups=2)'
    climb(project, f"{EASY}, {hard}, {late}, Ladder(name='flat')")
    assert texts(project, "levels", code=True) == [
        "ok: easy 0 to 3, hard 2 to 5: each begins at the first; 4 groups of a level raise it at a solve rate of 0.7 and "
        "lower it at 0.1",
        "ok: late 0 to 1: each begins at the first; 2 groups of a level raise it at a solve rate of 0.5 and lower it at 0.2",
        "ok: 1 of 4 ladders have one level",
    ]


def test_a_run_that_is_too_short_for_its_ladders_is_noted(project: Project) -> None:
    many = ", ".join(f'Ladder(name="l{number}", last_level=1)' for number in range(8))
    climb(project, f"{EASY}, {many}")
    project.keys["run.num_batches"] = 8
    shown, short = texts(project, "levels", code=True)[1:]
    assert shown.startswith("ok: l0 0 to 1, l1 0 to 1, l2 0 to 1, l3 0 to 1, l4 0 to 1, l5 0 to 1 and 2 more: each begins")
    assert short == ("warn: the run has 64 groups, too few to judge a level of l0, l1, l2, l3, l4, l5 and 2 more once")


@pytest.mark.parametrize(
    ("ladder", "text"),
    [
        ('Ladder(name="sums", first_level=3, last_level=2)', "sums: its levels are 3 to 2"),
        ('Ladder(name="sums", weight=float("nan"))', "sums: weight is nan"),
        (f"{EASY}, {EASY}", 'two ladders are called "easy"'),
    ],
)
def test_a_mistake_in_a_ladder_is_named(project: Project, ladder: str, text: str) -> None:
    climb(project, ladder)
    (broken,) = texts(project, "train tasks", code=True)
    assert broken.startswith("fail")
    assert text in broken


def test_an_option_of_the_server_that_nobody_has_tried_is_named(project: Project) -> None:
    assert not texts(project, "server options")
    project.keys["rollout.server_args"] = ["--log-level", "info", "--cpu-offload-gb=4", "--made-up"]
    first, second = texts(project, "server options")
    assert first.startswith("warn: rollout.server_args has --cpu-offload-gb: nobody has compared")
    assert "--made-up" in second
