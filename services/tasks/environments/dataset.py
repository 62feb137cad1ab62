"""Questions from files; the answer is compared as mathematics, or graded by a reward of your own.

Rows work as they are published: ``maths/layouts.py`` lists the layouts that are recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec

from gspo.tasks.environments import (
    Environment,
    RewardForm,
    RewardJob,
    Split,
    Start,
    State,
    Step,
    Task,
    TaskSource,
)
from gspo.tasks.maths import GRADE_ANSWER, GoldKind, is_same_vote
from gspo_services.tasks.environments.maths import (
    AUTO,
    GSM8K_MARKER,
    TYPE_KEYS,
    Columns,
    Gold,
    Questions,
    ReadGold,
    golds_of,
    marker_in,
    messages_of,
    read_question,
    said_answer,
    tasks_of_questions,
    typed_by_row,
    vote_in,
)
from gspo_services.tasks.environments.rows import plain_task
from gspo_services.tasks.environments.sources import (
    OnBadRow,
    RowFilter,
    SourceOptions,
    column_of,
)

COMPARISON_CPU_S: Final = 5.0
"""Processor seconds for comparing one answer."""
VERL_COLUMNS = ("data_source", "extra_info", "reward_model")
"""Columns of verl's rows, from which its reward functions get their arguments."""


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the questions, and how they are asked."""

    train_path: str = ""
    """The training split: a file (.jsonl, .json, .csv, .parquet), a pattern such as data/train-*.parquet, or a folder; ~ and
    $NAME are filled in. "" when there is none."""
    eval_path: str = ""
    """The held-out split, likewise."""
    sources: tuple[SourceOptions, ...] = ()
    """In place of train_path: several, as {path, weight, name}. They are sampled in proportion to their weights."""
    id_column: str = ""
    """The column that identifies a task; "": its content does. The same row again is the same task."""
    filter: RowFilter = RowFilter()
    """Training rows to leave out: {min_chars, max_chars, pass_rate_column, min_pass_rate, max_pass_rate}."""
    prompt_column: str = ""
    """Text, or a conversation: a list of {role, content}. "a.b" is column b inside column a; "" recognises the layout."""
    answer_column: str = "auto"
    """The gold, or a list of answers that are all right. "auto" recognises the layout; a reward of your own needs no answer.
    "": the rows have none, and a reward of your own or the reward model grades."""
    choices_column: str = "auto"
    """The options of a multiple choice, which are shown as A, B, ... and of which the gold names one. "auto" recognises the
    layout; "": they are not shown."""
    context_columns: tuple[str, ...] = ("auto",)
    """Columns that are shown beside the question, such as a passage. ["auto"] recognises them; []: none."""
    task_columns: tuple[str, ...] = ()
    """More columns that a reward of your own gets in its ``task``: text, numbers, truth values, lists and maps."""
    gold_marker: str = "auto"
    """What the gold stands behind in its column; "" takes all of it. "auto": behind #### where the rows have it (GSM8K),
    else in the last box, else all."""
    answer_marker: str = "auto"
    """What the policy's answer stands behind; "" for none. "auto": what the row's prompt asks for or verl's scorer of its
    data_source looks for (#### or Answer:), #### where golds have it, else none. Where the text has no marker, the last box
    counts, and without one what the last line says."""
    system_prompt: str = "auto"
    """The system message; "" for none. "auto": how to state the answer, unless the prompt says it or a reward of your own
    grades."""
    kind: GoldKind = "symbolic"
    """symbolic: answers are compared by what they mean, so that 15 - 43 is -28, and letters alone are words. number: golds
    and answers are numbers: a policy that is asked for 15 - 43 learns to repeat it. integer: whole numbers, however they are
    said. expression: as symbolic, and letters are variables, so that ab is ba. list: as symbolic, and several answers are
    right in their order alone. text: words, without case and marks, and numbers. countdown: "98 = 44, 19, 35", any
    arithmetic of these numbers that makes 98. Options, passages and Countdown decide for themselves."""
    on_bad_row: OnBadRow = "error"
    """A row without a usable question or answer stops the run, or is counted and left out."""
    reward: str = ""
    """A function "package.module:function" of (completion, task) that grades; "": answers are compared as mathematics."""
    reward_form: RewardForm = ""
    """How that function is called. "": as (completion, task). "verl": as verl's compute_score; columns data_source,
    extra_info and reward_model are read where rows have them. "trl": as a reward function of TRL, which gets task_columns
    and the answer as lists of one, and texts or messages, as the row's prompt is. "trl_chat": the same, always messages."""
    reward_url: str = ""
    """In place of a function: a service that gets {"completion", "task"} by POST and answers {"reward": ...}."""
    graded_alone: bool = True
    """False: an answer alone is worth 0, because reward.group compares all answers of a group. Then there are no
    evaluations, which grade each answer alone."""
    reward_weights: dict[str, float] | None = None
    """What each named component of a reward of your own counts; each must be there. Left out: the sum of all."""
    reward_deadline_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """Wall-clock seconds for grading one answer. What is longer is killed, and reward.on_deadline says what it is worth."""

    @property
    def has_own_reward(self) -> bool:
        return bool(self.reward or self.reward_url)

    @property
    def compares(self) -> bool:
        """Whether answers are compared with the rows'."""
        return self.graded_alone and bool(self.answer_column) and not self.has_own_reward

    @property
    def columns(self) -> Columns:
        """What is said about the rows."""
        answer = "" if self.answer_column == AUTO else self.answer_column
        return Columns(
            self.prompt_column, answer, gold_marker=self.gold_marker, needs_answer=self.compares,
            choices=self.choices_column, context=self.context_columns,
        )  # fmt: skip


class DatasetState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode before its only turn."""

    answer: Gold
    marker: str = ""
    kind: GoldKind | None = None
    """What the gold is, where the row says it."""
    options: list[Any] = []


class Dataset(Environment):
    """One question, one answer; it is compared as mathematics (1 or 0), or a reward of your own grades it."""

    options_type = DatasetOptions

    def __init__(self, options: DatasetOptions) -> None:
        """Raises: ValueError when the options of the reward do not fit together."""
        _require_reward(options)
        self._options = options

    @property
    def reward_functions(self) -> Sequence[str | RewardJob]:
        """The function that grades, and what it gets; none for a service."""
        options = self._options
        if not options.reward:
            return () if options.reward_url or not options.compares else (GRADE_ANSWER,)
        columns = ("prompt", *(["answer"] if options.answer_column else []), *options.task_columns)
        if options.reward_form == "verl":
            columns = (*columns, *VERL_COLUMNS)
        task: Task = {column: {"ground_truth": ""} if column == "reward_model" else None for column in columns}
        return (self._own_reward("").for_task(task).for_turn([]),)

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's files, in their order. Raises: ValueError that names the file and line of a bad row."""
        options = self._options
        if split == "eval" and not options.graded_alone:
            raise ValueError(
                "graded_alone is false, and evaluations grade each answer alone: set reward or reward_url, or switch them "
                "off (evaluation.every_batches = 0)"
            )
        # What a reward of the user's own makes of two answers to one prompt is its own affair.
        kind = options.kind if options.compares else None
        used = (*options.task_columns, *(VERL_COLUMNS if options.reward_form == "verl" else ()))
        questions = Questions(
            "dataset environment", options.columns, lambda record, _: _row(record, options), kind, used=used
        )
        return tasks_of_questions(questions, split, options)

    def golds(self, tasks: TaskSource) -> Iterator[ReadGold]:
        """The answers of ``tasks`` that are compared as mathematics; none beside a reward of your own."""
        return golds_of(tasks, self._options.kind) if self._options.compares else iter(())

    def start(self, task: Task, seed: int) -> Start:
        """Ask the question; nothing in this environment is random."""
        options = self._options
        marker = self._marker(task) if options.compares else None
        state: State = {}
        if marker is not None:
            state = {"answer": task["answer"], "marker": marker, **{key: task[key] for key in TYPE_KEYS if key in task}}
        return Start(
            state=state, messages=messages_of(task["prompt"], options.system_prompt, marker, is_choice="options" in task)
        )

    def _marker(self, task: Task) -> str:
        """What the policy's answer to a task stands behind."""
        option = self._options.answer_marker
        return str(task.get("answer_marker", "")) if option == AUTO else option

    def step(self, state: State, action: str) -> Step:
        """Have the answer graded; the episode is over."""
        if self.needs_reward_model or not self._options.graded_alone:
            return Step(state=state, messages=[], reward=0.0, done=True)
        job = self._own_reward(action) if self._options.has_own_reward else self._comparison(state, action)
        return Step(state=state, messages=[], reward=job, done=True)

    @property
    def needs_reward_model(self) -> bool:
        """Without an answer and a reward of its own."""
        options = self._options
        return options.graded_alone and not (options.has_own_reward or options.compares)

    def answer(self, task: Task, action: str) -> str | None:
        """The final answer, in one spelling."""
        return vote_in(task, said_answer(action, marker_in(action, self._marker(task))))

    def is_same_answer(self, task: Task, one: str, other: str) -> bool:
        """Whether both mean the same."""
        return is_same_vote(one, other)

    def _own_reward(self, action: str) -> RewardJob:
        options = self._options
        return RewardJob(
            function=options.reward,
            form=options.reward_form,
            url=options.reward_url,
            arguments={"completion": action},
            with_task=True,
            deadline_s=options.reward_deadline_s,
            weights=options.reward_weights,
        )

    def _comparison(self, state: State, action: str) -> RewardJob:
        asked, deadline_s = msgspec.convert(state, DatasetState), self._options.reward_deadline_s
        arguments: State = {
            "gold": asked.answer, "answer": said_answer(action, marker_in(action, asked.marker)),
            "kind": asked.kind or self._options.kind, "place": "", "cpu_s": min(COMPARISON_CPU_S, deadline_s / 2),
            "options": asked.options,
        }  # fmt: skip
        return RewardJob(function=GRADE_ANSWER, arguments=arguments, deadline_s=deadline_s, weights={"right": 1.0})


def _require_reward(options: DatasetOptions) -> None:
    if options.reward and options.reward_url:
        raise ValueError(
            f'reward is "{options.reward}" and reward_url is "{options.reward_url}": a function or a service grades, not '
            "both"
        )
    if options.reward and not re.fullmatch(r"[\w.]+:\w+", options.reward):
        raise ValueError(
            f'reward is "{options.reward}": expected "package.module:function"; a service is named by reward_url'
        )
    if options.reward_form and not options.reward:
        raise ValueError(
            f'reward_form is "{options.reward_form}" and reward names no function: name it, or leave the form out'
        )
    if options.reward_form and options.reward_weights is not None:
        raise ValueError(
            f'reward_form is "{options.reward_form}", whose functions say themselves what an answer is worth: leave '
            "reward_weights out"
        )
    if options.reward_url and not _is_http(options.reward_url):
        raise ValueError(f'reward_url is "{options.reward_url}": expected a URL such as "http://rewards:8080/grade"')
    if options.has_own_reward and not options.graded_alone:
        raise ValueError(
            f'graded_alone is false and reward is "{options.reward or options.reward_url}": it grades answers alone; leave '
            "one of them out"
        )
    if not options.has_own_reward and options.reward_weights is not None:
        raise ValueError("reward_weights are for a reward of your own, and there is none: set reward")
    if options.reward_weights is not None and not options.reward_weights:
        raise ValueError("reward_weights is empty, so that every reward would be 0: name components, or leave it out")
    own = {"prompt", "answer_marker"} | (
        {"answer"} if options.compares or options.answer_column not in ("", AUTO) else set()
    )
    taken = own & set(options.task_columns)
    if taken:
        raise ValueError(f"task_columns has {', '.join(sorted(taken))}, which the task holds already: leave it out")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _row(record: dict[str, Any], options: DatasetOptions) -> Task:
    """The row in ``record``. Raises: ValueError with what is wrong."""
    question = read_question(record, options.columns, compared=options.compares)
    task: Task = {"prompt": question.prompt}
    if question.gold is not None and "answer" not in options.task_columns:
        task |= {"answer": question.gold, **typed_by_row(question, options.kind, options.task_columns)}
    marker = question.marker if question.marker is not None else GSM8K_MARKER if question.gold_is_marked else ""
    if marker and options.answer_marker == AUTO and options.compares:
        task["answer_marker"] = marker
    if options.reward_form == "verl":
        task |= {column: record[column] for column in VERL_COLUMNS if column in record}
    return plain_task(task | {column: column_of(record, column, "task_columns says") for column in options.task_columns})
