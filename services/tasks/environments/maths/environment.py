"""The environment ``math``: problems whose answer is an integer or an expression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from gspo.tasks.environments import Environment, RewardJob, Split, Start, State, Step, Task, TaskSource
from gspo.tasks.maths import GRADE_ANSWER, GoldKind, is_same_vote
from gspo_services.tasks.environments.maths.conventions import marker_in, messages_of
from gspo_services.tasks.environments.maths.final_answer import AnswerForm, stated_answer
from gspo_services.tasks.environments.maths.golds import Questions, ReadGold, golds_of, tasks_of_questions, vote_in
from gspo_services.tasks.environments.maths.layouts import Columns
from gspo_services.tasks.environments.maths.rows import TYPE_KEYS, name_in, read_question, typed_by_row
from gspo_services.tasks.environments.rows import plain_task
from gspo_services.tasks.environments.sources import (
    OnBadRow,
    RowFilter,
    RowPlace,
    SourceOptions,
    column_of,
    without_place,
)

DEADLINE_OVER_CPU: Final = 6.0
LEAST_DEADLINE_S: Final = 30.0
"""The clock allows many times an answer's processor time: it is for what no signal interrupts, not for a busy machine."""


class MathOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the problems, and what an answer is."""

    train_path: str = ""
    """The training split: a file (.jsonl, .json, .csv, .parquet), a pattern such as data/train-*.parquet, or a folder; ~ and
    $NAME are filled in. "" when there is none."""
    eval_path: str = ""
    """The held-out split, likewise."""
    sources: tuple[SourceOptions, ...] = ()
    """In place of train_path: several, as {path, weight, name}. They are sampled in proportion to their weights."""
    problem_column: str = ""
    """Text, or a conversation. "a.b" is column b inside column a; "" recognises the layout."""
    answer_column: str = ""
    """The answer, or a list of answers that are all right; "" recognises the layout."""
    gold_marker: str = "auto"
    """What the row's answer stands behind in its column; "" takes all of it. "auto": behind #### where the rows have it,
    else in the last box, else all."""
    choices_column: str = "auto"
    """The options of a multiple choice, which are shown as A, B, ... and of which the gold names one. "auto" recognises the
    layout; "": they are not shown."""
    context_columns: tuple[str, ...] = ("auto",)
    """Columns that are shown beside the question, such as a passage. ["auto"] recognises them; []: none."""
    task_columns: tuple[str, ...] = ()
    """More columns that go with the task, such as level or rating."""
    kind: GoldKind = "symbolic"
    """integer: whole numbers, however they are said (AIME). number: numbers, said as numbers. symbolic: whatever mathematics
    writes, by what it means, so that 15 - 43 is -28: a policy that is asked for it learns to repeat it. expression, list,
    text: as of dataset."""
    answer_form: AnswerForm | Literal["auto"] = "auto"
    """Where the policy states its answer: boxed, marked, or either. "auto": boxed, unless the row's prompt or its
    data_source asks for a marker (#### or Answer:)."""
    marker: str = "Answer:"
    """What a marked answer stands behind."""
    system_prompt: str = "auto"
    """The system message; "" for none. "auto": how to state the answer, unless the prompt says it."""
    cpu_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Processor seconds for one symbolic answer. A slower one is worth 0."""
    on_bad_row: OnBadRow = "error"
    """A row that cannot be used stops the run, or is counted and left out."""
    id_column: str = ""
    """The column that identifies a problem; "": its content does, wherever it lies. The same row again is the same task."""
    filter: RowFilter = RowFilter()
    """Training rows to leave out: {min_chars, max_chars, pass_rate_column, min_pass_rate, max_pass_rate}."""


class Mathematics(Environment):
    """One problem, one answer: 1 when it equals the row's, else 0."""

    options_type = MathOptions

    def __init__(self, options: MathOptions) -> None:
        """Raises: ValueError for a marker that is empty and asked for."""
        if options.answer_form in ("marked", "either") and not options.marker:
            raise ValueError(f'marker is "", and answer_form is "{options.answer_form}": say what an answer stands behind')
        self._options = options

    @property
    def reward_functions(self) -> Sequence[str]:
        """The function that compares."""
        return (GRADE_ANSWER,)

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's file, in its order. Raises: ValueError that names the file and line of a bad row."""
        options = self._options
        questions = Questions(
            "math environment", self._columns, self._task, options.kind, without_place, options.task_columns
        )
        return tasks_of_questions(questions, split, options)

    def golds(self, tasks: TaskSource) -> Iterator[ReadGold]:
        """The answers of ``tasks``."""
        return golds_of(tasks, self._options.kind)

    def start(self, task: Task, seed: int) -> Start:
        """Say the problem; nothing in this environment is random."""
        state: State = {"answer": task["answer"], "place": task["place"], "marker": task.get("answer_marker", "")}
        state |= {key: task[key] for key in TYPE_KEYS if key in task}
        marker = self._marker(task)
        return Start(
            state=state,
            messages=messages_of(task["prompt"], self._options.system_prompt, marker, is_choice="options" in task),
        )

    @property
    def _columns(self) -> Columns:
        options = self._options
        return Columns(
            options.problem_column, options.answer_column, "problem_column", gold_marker=options.gold_marker,
            choices=options.choices_column, context=options.context_columns,
        )  # fmt: skip

    def _marker(self, said: Task) -> str:
        """What the policy's answer stands behind; "" for a box. ``said``: a task, or the state of its episode."""
        options = self._options
        if options.answer_form != "auto":
            return "" if options.answer_form == "boxed" else options.marker
        return str(said.get("answer_marker", said.get("marker", "")))

    def _stated(self, said: Task, action: str) -> str | None:
        marker = marker_in(action, self._marker(said))
        if self._options.answer_form != "auto":
            return stated_answer(action, self._options.answer_form, marker)
        # As verl reads DAPO's answers: a box counts where the marker is not there.
        return (stated_answer(action, "marked", marker) if marker else None) or stated_answer(action, "boxed", "")

    def step(self, state: State, action: str) -> Step:
        """Have the answer compared; the episode is over."""
        options = self._options
        arguments: State = {
            "gold": state["answer"], "answer": self._stated(state, action),
            "kind": state.get("kind", options.kind), "place": state["place"], "cpu_s": options.cpu_s,
            "options": state.get("options", []),
        }  # fmt: skip
        deadline_s = max(LEAST_DEADLINE_S, DEADLINE_OVER_CPU * options.cpu_s)
        job = RewardJob(function=GRADE_ANSWER, arguments=arguments, deadline_s=deadline_s, weights={"right": 1.0})
        return Step(state=state, messages=[], reward=job, done=True)

    def answer(self, task: Task, action: str) -> str | None:
        """The stated answer, in one spelling."""
        return vote_in(task, self._stated(task, action))

    def is_same_answer(self, task: Task, one: str, other: str) -> bool:
        """Whether both mean the same."""
        return is_same_vote(one, other)

    def _task(self, record: dict[str, Any], where: RowPlace) -> Task:
        options, place = self._options, f"{where.file}, {where.place}"
        question = read_question(record, self._columns, compared=True)
        task: Task = {"prompt": question.prompt, "answer": question.gold, "place": place}
        task |= typed_by_row(question, options.kind)
        if question.marker:
            task["answer_marker"] = question.marker
        if name := name_in(record):
            task["name"] = name
        for column in options.task_columns:
            if column in task:
                raise ValueError(f'task_columns names "{column}", which is taken: leave it out')
            task[column] = column_of(record, column, "task_columns says")
        return plain_task(task)
