"""The environment ``math``: problems whose answer is an integer or an expression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec

from gspo.tasks.environments import ChatMessage, Environment, RewardJob, Split, Start, State, Step, Task, TaskSource
from gspo_services.tasks.environments.maths.answers import AnswerForm, stated_answer
from gspo_services.tasks.environments.maths.golds import GoldCheck
from gspo_services.tasks.environments.maths.rows import answer_in, name_in, problem_in
from gspo_services.tasks.environments.rows import plain_task
from gspo_services.tasks.environments.sources import (
    OnBadRow,
    RowFilter,
    RowPlace,
    SourceOptions,
    TaskReading,
    tasks_of_split,
    without_place,
)
from gspo_services.tasks.reward_worker.maths import GRADE_ANSWER, GoldKind, is_same_vote, vote_of

DEADLINE_OVER_CPU: Final = 6.0
LEAST_DEADLINE_S: Final = 30.0
"""The clock allows many times an answer's processor time: it is for what no signal interrupts, not for a busy machine."""


class MathOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the problems, and what an answer is."""

    train_path: str = ""
    """The training split: a .jsonl or .parquet file, a folder with such shards, or a dataset that Hugging Face's
    save_to_disk wrote; "" when there is none."""
    eval_path: str = ""
    """The held-out split, likewise."""
    sources: tuple[SourceOptions, ...] = ()
    """In place of train_path: several, as {path, weight, name}. They are sampled in proportion to their weights."""
    problem_column: str = ""
    """"" looks for problem, Problem, question, prompt."""
    answer_column: str = ""
    """"" looks for answer, Answer, and for a solution that ends with its answer in a box."""
    task_columns: tuple[str, ...] = ()
    """More columns that go with the task, such as level or rating."""
    kind: GoldKind = "symbolic"
    """integer: answers are whole numbers (AIME). symbolic: whatever mathematics writes, compared by what it means."""
    answer_form: AnswerForm = "boxed"
    """Where the policy states its answer: boxed, marked, or either."""
    marker: str = "Answer:"
    """What a marked answer stands behind."""
    system_prompt: str = "Reason step by step, and put your final answer within \\boxed{}."
    """The system message; "" for none."""
    cpu_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Processor seconds for one symbolic answer. A slower one is worth 0."""
    on_bad_row: OnBadRow = "error"
    """A row that cannot be used stops the run, or is counted and left out."""
    id_column: str = ""
    """The column that identifies a problem; "": its content does, wherever it lies. Two of one identity are refused."""
    filter: RowFilter = RowFilter()
    """Training rows to leave out: {min_chars, max_chars, pass_rate_column, min_pass_rate, max_pass_rate}."""


class Mathematics(Environment):
    """One problem, one answer: 1 when it equals the row's, else 0."""

    options_type = MathOptions

    def __init__(self, options: MathOptions) -> None:
        """Raises: ValueError for a marker that is empty and asked for."""
        if options.answer_form != "boxed" and not options.marker:
            raise ValueError(f'marker is "", and answer_form is "{options.answer_form}": say what an answer stands behind')
        self._options = options

    @property
    def reward_functions(self) -> Sequence[str]:
        """The function that compares."""
        return (GRADE_ANSWER,)

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's file, in its order. Raises: ValueError that names the file and line of a bad row."""
        options = self._options
        golds = GoldCheck(options.kind, options.on_bad_row)

        def task_of(record: dict[str, Any], where: RowPlace) -> tuple[Task, int]:
            task = self._task(record, where)
            golds.require(str(task["answer"]), where)
            return task, len(str(task["prompt"]))

        reading = TaskReading(task_of, options.on_bad_row, options.id_column, options.filter, content=without_place)
        tasks = tasks_of_split("math environment", split, options, reading)
        golds.finish()
        return tasks

    def golds(self, tasks: TaskSource) -> Iterator[str]:
        """The answers of ``tasks``."""
        return (str(tasks.task(index)["answer"]) for index in range(tasks.num_tasks or 0))

    def start(self, task: Task, seed: int) -> Start:
        """Say the problem; nothing in this environment is random."""
        messages: list[ChatMessage] = []
        if self._options.system_prompt:
            messages.append({"role": "system", "content": self._options.system_prompt})
        messages.append({"role": "user", "content": str(task["prompt"])})
        state: State = {"answer": task["answer"], "place": task["place"]}
        return Start(state=state, messages=messages)

    def step(self, state: State, action: str) -> Step:
        """Have the answer compared; the episode is over."""
        options = self._options
        arguments: State = {
            "gold": state["answer"], "answer": stated_answer(action, options.answer_form, options.marker),
            "kind": options.kind, "place": state["place"], "cpu_s": options.cpu_s,
        }  # fmt: skip
        deadline_s = max(LEAST_DEADLINE_S, DEADLINE_OVER_CPU * options.cpu_s)
        job = RewardJob(function=GRADE_ANSWER, arguments=arguments, deadline_s=deadline_s, weights={"right": 1.0})
        return Step(state=state, messages=[], reward=job, done=True)

    def answer(self, task: Task, action: str) -> str | None:
        """The stated answer, in one spelling."""
        said = stated_answer(action, self._options.answer_form, self._options.marker)
        return None if said is None else vote_of(said) or None

    def is_same_answer(self, task: Task, one: str, other: str) -> bool:
        """Whether both mean the same."""
        return is_same_vote(one, other)

    def _task(self, record: dict[str, Any], where: RowPlace) -> Task:
        options, place = self._options, f"{where.file}, {where.place}"
        answer = answer_in(record, options.answer_column)
        task: Task = {"prompt": problem_in(record, options.problem_column), "answer": answer, "place": place}
        if name := name_in(record):
            task["name"] = name
        for column in options.task_columns:
            if column in task or column not in record:
                why = "is taken" if column in task else "is not there"
                raise ValueError(f'task_columns names "{column}", which {why}: there are {", ".join(sorted(record))[:300]}')
            task[column] = record[column]
        return plain_task(task)
