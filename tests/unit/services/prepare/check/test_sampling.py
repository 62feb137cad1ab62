"""What a check says about dynamic sampling and tasks that rest."""

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
