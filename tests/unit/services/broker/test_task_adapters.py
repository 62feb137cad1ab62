"""Which adapter a task belongs to, and tasks that name none of the run's."""

from typing import Any

import pytest

from gspo.tasks.environments import Task
from gspo_services.broker.task_adapters import TaskAdapters
from gspo_services.shared.runtime.errors import ConfigurationError


class Tasks:
    def __init__(self, *kinds: Any, endless: bool = False) -> None:
        self._kinds = kinds
        self.num_tasks = None if endless else len(kinds)

    def task(self, index: int) -> Task:
        kind = self._kinds[index % len(self._kinds)]
        return {"prompt": str(index), "more": {} if kind is None else {"kind": kind}}


def adapters_of(train: Tasks, **others: Tasks) -> TaskAdapters:
    return TaskAdapters(["sums", "words"], "more.kind", {"train": train, **others})


def test_the_field_of_a_task_names_its_adapter() -> None:
    adapters = adapters_of(Tasks("sums", "words"), eval=Tasks("words"))
    adapters.require()
    assert [adapters.of("train", index) for index in (0, 1)] == ["sums", "words"]
    assert adapters.of("eval", 0) == "words"


def test_without_several_adapters_no_task_is_looked_at() -> None:
    adapters = TaskAdapters([], "", {"train": Tasks(None)})
    adapters.require()
    assert adapters.of("train", 0) == ""
    assert adapters.of_task({}) == ""


@pytest.mark.parametrize(
    ("adapters", "text"),
    [
        (
            adapters_of(Tasks("sums", "words", "verbs")),
            r"task 2 \(train\): more.kind is 'verbs', and lora.adapters are sums, w",
        ),
        (adapters_of(Tasks("sums", "words", 7)), r"task 2 \(train\): more.kind is 7, and lora.adapters are"),
        (adapters_of(Tasks("sums", "words", None)), r'no column "more.kind": .* \(lora.adapter_field says which to use\)'),
        (adapters_of(Tasks("sums", "words"), eval=Tasks("odd")), r"task 0 \(eval\): more.kind is 'odd'"),
        (adapters_of(Tasks("sums", "verbs", endless=True)), r"task 1 \(train\): more.kind is 'verbs'"),
        (adapters_of(Tasks("sums")), "no training task has 'words' in 'more.kind': that adapter would learn nothing"),
    ],
)
def test_a_task_of_no_adapter_and_an_adapter_of_no_task_are_refused_before_the_run(
    adapters: TaskAdapters, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        adapters.require()


def test_an_adapter_may_have_no_held_out_task_nor_be_among_the_first_of_an_endless_source() -> None:
    adapters_of(Tasks("sums", "words"), eval=Tasks("words")).require()
    adapters_of(Tasks("sums", endless=True)).require()
