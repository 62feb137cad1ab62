"""Questions from a JSONL or Parquet file; the answer is compared as mathematics, or graded by a reward of your own.

GSM8K's files work as they are: columns ``question`` and ``answer``, where the final answer follows "####".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from gspo.tasks.environments import ChatMessage, Environment, RewardJob, Split, Start, State, Step, Task, TaskSource
from gspo_services.tasks.environments.rows import num_characters, plain_task, usable_rows
from gspo_services.tasks.environments.sources import (
    OnBadRow,
    RowFilter,
    RowPlace,
    SourceOptions,
    TaskReading,
    chat_messages,
    column_of,
    tasks_of_split,
)

VERIFY_ANSWER = "gspo_services.tasks.reward_worker.mathematics:verify_answer"


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the questions, and how they are asked."""

    train_path: str = ""
    """The training split: a .jsonl or .parquet file, a folder with such shards, or a dataset that Hugging Face's
    save_to_disk wrote; "" when there is none."""
    eval_path: str = ""
    """The held-out split, likewise."""
    sources: tuple[SourceOptions, ...] = ()
    """In place of train_path: several, as {path, weight, name}. They are sampled in proportion to their weights."""
    id_column: str = ""
    """The column that identifies a task; "": its content does. Two tasks of one identity are refused."""
    filter: RowFilter = RowFilter()
    """Training rows to leave out: {min_chars, max_chars, pass_rate_column, min_pass_rate, max_pass_rate}."""
    prompt_column: str = "question"
    """Text, or a conversation: a list of {role, content}. "a.b" is column b inside column a."""
    answer_column: str = "answer"
    """"": the rows have no answer, and a reward of your own grades."""
    task_columns: tuple[str, ...] = ()
    """More columns that a reward of your own gets in its ``task``: text, numbers, truth values, lists and maps."""
    answer_marker: str = "####"
    """The final answer follows the last marker, in the file and in the policy's text; "" takes the whole text. Without the
    marker the policy's whole text is judged."""
    system_prompt: str = "Solve the problem step by step. Give the final answer after ####."
    """The system message; "" for none."""
    on_bad_row: OnBadRow = "error"
    """A row without a usable question or answer stops the run, or is counted and left out."""
    reward: str = ""
    """A function "package.module:function" of (completion, task) that grades; "": math-verify compares the answers."""
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


class DatasetState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode before its only turn."""

    answer: str


class Dataset(Environment):
    """One question, one answer; math-verify compares it (1 or 0), or a reward of your own grades it."""

    options_type = DatasetOptions

    def __init__(self, options: DatasetOptions) -> None:
        """Raises: ValueError when the options of the reward do not fit together."""
        _require_reward(options)
        self._options = options

    @property
    def reward_functions(self) -> Sequence[str]:
        """The function that grades; none for a service, and where nothing grades an answer alone."""
        return () if self._options.reward_url or not self._options.graded_alone else (self._options.reward or VERIFY_ANSWER,)

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's files, in their order. Raises: ValueError that names the file and line of a bad row."""
        options = self._options
        if split == "eval" and not options.graded_alone:
            raise ValueError(
                "graded_alone is false, and evaluations grade each answer alone: set reward or reward_url, or switch them "
                "off (evaluation.every_batches = 0)"
            )
        reading = TaskReading(self._task_of_row, options.on_bad_row, options.id_column, options.filter)
        return tasks_of_split("dataset environment", split, options, reading)

    def _task_of_row(self, record: dict[str, Any], _where: RowPlace) -> tuple[Task, int]:
        task = _row(record, self._options)
        return task, num_characters(task["prompt"])

    def start(self, task: Task, seed: int) -> Start:
        """Ask the question; nothing in this environment is random."""
        prompt = task["prompt"]
        asked: list[ChatMessage] = (
            chat_messages("prompt", prompt) if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        )
        messages: list[ChatMessage] = []
        if self._options.system_prompt and asked[0]["role"] != "system":
            messages.append({"role": "system", "content": self._options.system_prompt})
        messages += asked
        compares = self._options.graded_alone and not self._options.has_own_reward
        return Start(state={"answer": str(task["answer"])} if compares else {}, messages=messages)

    def step(self, state: State, action: str) -> Step:
        """Have the answer graded; the episode is over."""
        if not self._options.graded_alone:
            return Step(state=state, messages=[], reward=0.0, done=True)
        job = self._own_reward(action) if self._options.has_own_reward else self._comparison(state, action)
        return Step(state=state, messages=[], reward=job, done=True)

    def answer(self, task: Task, action: str) -> str | None:
        """The final answer, without blanks; a text without the marker has none."""
        said = final_answer(action, self._options.answer_marker)
        return "".join(said.split()) or None if said is not None else None

    def _own_reward(self, action: str) -> RewardJob:
        return RewardJob(
            function=self._options.reward,
            url=self._options.reward_url,
            arguments={"completion": action},
            with_task=True,
            deadline_s=self._options.reward_deadline_s,
            weights=self._options.reward_weights,
        )

    def _comparison(self, state: State, action: str) -> RewardJob:
        gold = msgspec.convert(state, DatasetState).answer
        said = final_answer(action, self._options.answer_marker)
        return RewardJob(
            function=VERIFY_ANSWER,
            arguments={"gold": gold, "answer": action if said is None else said},
            deadline_s=self._options.reward_deadline_s,
        )


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
    if options.reward_url and not _is_http(options.reward_url):
        raise ValueError(f'reward_url is "{options.reward_url}": expected a URL such as "http://rewards:8080/grade"')
    if options.has_own_reward and not options.graded_alone:
        raise ValueError(
            f'graded_alone is false and reward is "{options.reward or options.reward_url}": it grades answers alone; leave '
            "one of them out"
        )
    if options.graded_alone and not options.has_own_reward and not options.answer_column:
        raise ValueError(
            'answer_column is "", and without an answer there is nothing to compare: set reward or reward_url, or name the '
            "column; where reward.group is the only reward, set graded_alone = false"
        )
    if not options.has_own_reward and options.reward_weights is not None:
        raise ValueError("reward_weights are for a reward with named components, and math-verify has none: set reward")
    if options.reward_weights is not None and not options.reward_weights:
        raise ValueError("reward_weights is empty, so that every reward would be 0: name components, or leave it out")
    taken = {"prompt", *(["answer"] if options.answer_column else [])} & set(options.task_columns)
    if taken:
        raise ValueError(f"task_columns has {', '.join(sorted(taken))}, which the task holds already: leave it out")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def load_rows(path: Path, options: DatasetOptions) -> list[Task]:
    """The usable rows of ``path``: {"prompt": text, "answer": text} and the columns that ``options`` name.

    Raises: ValueError, with the file, the line and what is wrong, for a bad row (unless they are skipped), for a file that
    cannot be read or is of another kind, and when no row is left.
    """
    return usable_rows(path, lambda record: _row(record, options), options.on_bad_row)


def final_answer(text: str, marker: str) -> str | None:
    """The text after the last ``marker``; None without one; all of ``text`` when ``marker`` is ""."""
    if not marker:
        return text.strip()
    _, found, answer = text.rpartition(marker)
    return answer.strip() if found else None


def _row(record: dict[str, Any], options: DatasetOptions) -> Task:
    """The row in ``record``. Raises: ValueError with what is wrong."""
    task: Task = {"prompt": _prompt(record, options.prompt_column)}
    if options.answer_column:
        answer = final_answer(_text(record, options.answer_column), options.answer_marker)
        if not answer:
            raise ValueError(f'no answer after "{options.answer_marker}" in column "{options.answer_column}"')
        task["answer"] = answer
    return plain_task(task | {column: column_of(record, column, "task_columns says") for column in options.task_columns})


def _prompt(record: dict[str, Any], column: str) -> Any:
    """The text or the conversation in ``column``. Raises: ValueError."""
    value = column_of(record, column, "prompt_column and answer_column say")
    return chat_messages(column, value) if isinstance(value, list) else _text(record, column)


def _text(record: dict[str, Any], column: str) -> str:
    value = column_of(record, column, "prompt_column and answer_column say")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f'column "{column}" is {repr(value)[:100]}, not text')
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'column "{column}" is {value}, not a number that can be an answer')
    text = str(value).strip()
    if not text:
        raise ValueError(f'column "{column}" is empty')
    return text
