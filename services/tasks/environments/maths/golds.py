"""The check of every answer of a file when tasks are loaded: each must be gradable, or its row is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from gspo.tasks.environments import Plain, Split, Task, TaskSource
from gspo.tasks.maths import GoldForm, GoldKind, chosen, fault_of, gold_kind, is_same_vote, said_again, vote_of
from gspo_services.tasks.environments.maths.conventions import messages_of
from gspo_services.tasks.environments.maths.layouts import Columns, layout_of, roles_of
from gspo_services.tasks.environments.maths.offered import LETTERS
from gspo_services.tasks.environments.maths.rows import TYPE_KEYS, kind_in, options_in
from gspo_services.tasks.environments.rows import num_characters
from gspo_services.tasks.environments.sources import (
    MixedTasks,
    OnBadRow,
    RowFilter,
    RowPlace,
    SplitOptions,
    TaskReading,
    tasks_of_split,
)

MOST_NAMED: Final = 5
"""Rows that an error names."""


class GoldCheck:
    """Looks at each answer as its row is read."""

    def __init__(self, kind: GoldKind, on_bad_row: OnBadRow) -> None:
        self._kind = kind
        self._collects = on_bad_row == "error"
        self._faults: list[str] = []
        self._num_faults = 0

    def require(self, task: Task, where: RowPlace) -> None:
        """Take note of an answer that cannot be graded, for ``finish``. Raises: ValueError where such rows are left out, and
        for rows that come after ``finish``."""
        kind, options = kind_in(task, self._kind), options_in(task)
        faults = (fault_of(each, kind, options) for each in golds_in(task["answer"]))
        fault = next((fault for fault in faults if fault), None)
        if fault and not self._collects:
            raise ValueError(fault)
        if fault:
            self._num_faults += 1
            if len(self._faults) < MOST_NAMED:
                self._faults.append(f"{where.file}, {where.place}: {fault}")

    def finish(self) -> None:
        """Say which rows cannot be graded, and how many. Raises: ValueError."""
        self._collects = False
        if self._faults:
            shown = "\n".join(self._faults)
            several = "s" if self._num_faults > 1 else ""
            more = f"\nand {self._num_faults - len(self._faults):,} more" if self._num_faults > len(self._faults) else ""
            raise ValueError(
                f"{self._num_faults:,} answer{several} cannot be graded:\n{shown}{more}\nCorrect these rows, or set "
                'on_bad_row = "skip" to leave them out'
            )


class QuestionOptions(SplitOptions, Protocol):
    """What every environment of questions has among its options."""

    @property
    def on_bad_row(self) -> OnBadRow: ...
    @property
    def id_column(self) -> str: ...
    @property
    def filter(self) -> RowFilter: ...


class Questions(NamedTuple):
    """How rows become questions."""

    whose: str
    """The environment, for people."""
    columns: Columns
    task: Callable[[dict[str, Any], RowPlace], Task]
    """The task of a row, with its "prompt" and "answer". It raises ValueError for a row that cannot be used."""
    kind: GoldKind | None
    """What an answer is; None where nobody compares it, so that neither it nor another is wrong."""
    content: Callable[[Task], object] = lambda task: task
    """As ``TaskReading.content``."""
    used: tuple[str, ...] = ()
    """Columns that go with the task."""


def tasks_of_questions(questions: Questions, split: Split, options: QuestionOptions) -> MixedTasks:
    """The tasks of a split, whose answers can be graded. Raises: ValueError as ``tasks_of_split`` and ``GoldCheck``."""
    golds = GoldCheck(questions.kind, options.on_bad_row) if questions.kind else None

    def task_of(record: dict[str, Any], where: RowPlace) -> tuple[Task, int]:
        task = questions.task(record, where)
        if golds is not None:
            golds.require(task, where)
        return task, num_characters(task["prompt"])

    used = (*questions.used, *filter(None, (options.id_column, options.filter.pass_rate_column)))
    reading = TaskReading(
        task_of, options.on_bad_row, options.id_column, options.filter, content=questions.content,
        same_answer=is_same_gold if golds is not None else None,
        layout=lambda record: str(layout_of(record, questions.columns)),
        roles=lambda record: roles_of(layout_of(record, questions.columns), used),
    )  # fmt: skip
    tasks = tasks_of_split(questions.whose, split, options, reading)
    if golds is not None:
        golds.finish()
    return tasks


def is_same_gold(one: Plain, other: Plain) -> bool:
    """Whether two answers, or lists of answers that are all right, are the same to the grader. What only a library of
    algebra compares is not: files have a hundred thousand rows."""
    same = [[is_same_vote(each, every) for every in golds_in(other)] for each in golds_in(one)]
    return all(map(any, same)) and all(map(any, zip(*same, strict=True)))


def vote_in(task: Task, said: str | None) -> str | None:
    """An answer as a vote for it: of a multiple choice the letter. None for no answer."""
    place = chosen(said, options) if said is not None and (options := options_in(task)) else None
    return None if said is None else LETTERS[place] if place is not None else vote_of(said) or None


class ReadGold(NamedTuple):
    """An answer, and what it is read as."""

    text: str
    form: GoldForm


_FORM_OF_KIND: Final[dict[GoldKind, GoldForm]] = {
    "text": "words", "countdown": "countdown", "number": "number", "integer": "number"
}  # fmt: skip


@runtime_checkable
class ComparesAnswers(Protocol):
    """An environment that compares answers of a data set as mathematics."""

    def golds(self, tasks: TaskSource) -> Iterator[ReadGold]:
        """The answers of ``tasks``; none where a reward of the user grades."""
        ...


def golds_in(answer: Plain) -> list[str]:
    """The answer of a task, or several of which each is right."""
    return [str(each) for each in answer] if isinstance(answer, list) else [str(answer)]


def golds_of(tasks: TaskSource, kind: GoldKind) -> Iterator[ReadGold]:
    """The answers of ``tasks``, whose kind is ``kind`` unless their rows say another; several of one task one after the
    other. Of a multiple choice it is the letter with its text."""
    for index in range(tasks.num_tasks or 0):
        task = tasks.task(index)
        if options := options_in(task):
            letter = str(task["answer"])
            yield ReadGold(f"{letter}. {options[LETTERS.index(letter)]}", "choice")
            continue
        form = _FORM_OF_KIND.get(kind_in(task, kind))
        yield from (ReadGold(gold, form or gold_kind(gold)) for gold in golds_in(task["answer"]))


def questions_said_again(tasks: TaskSource, kind: GoldKind, most: int) -> list[str]:
    """The arithmetic in the prompts of the first ``most`` tasks that is graded right for them."""
    first = (tasks.task(index) for index in range(min(most, tasks.num_tasks or 0)))
    own = (task for task in first if not any(key in task for key in TYPE_KEYS))
    asked = ((messages_of(task["prompt"], "", None)[-1]["content"], golds_in(task["answer"])) for task in own)
    return said_again(asked, kind)


class AnswerForms(NamedTuple):
    """What the answers of a set are read as."""

    numbers: dict[GoldForm, int]
    examples: dict[GoldForm, list[str]]
    """Some of each."""


def forms_of(golds: Iterable[ReadGold]) -> AnswerForms:
    """How many of ``golds``, which have no fault, are read as what."""
    found = AnswerForms({}, {})
    for gold, form in golds:
        found.numbers[form] = found.numbers.get(form, 0) + 1
        examples = found.examples.setdefault(form, [])
        if len(examples) < MOST_NAMED and gold not in examples:
            examples.append(gold[:60])
    return found
