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

from gspo.environments import ChatMessage, Environment, RewardJob, Split, Start, State, Step, Task, TaskSource
from services.environments.rows import OnBadRow, PlainRows, plain_task, usable_rows

VERIFY_ANSWER = "services.reward_worker.mathematics:verify_answer"


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the questions, and how they are asked."""

    train_path: str = ""
    """File of the training split, *.jsonl or *.parquet; "" when there is none."""
    eval_path: str = ""
    """File of the held-out split, likewise."""
    prompt_column: str = "question"
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
        """The function that grades; none for a service."""
        return () if self._options.reward_url else (self._options.reward or VERIFY_ANSWER,)

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's file, in its order. Raises: ValueError that names the file and line of a bad row."""
        name = f"{split}_path"
        path = self._options.train_path if split == "train" else self._options.eval_path
        if not path:
            raise ValueError(f"the dataset environment needs {name} for its {split} split: name a .jsonl or .parquet file")
        return PlainRows(load_rows(Path(path), self._options))

    def start(self, task: Task, seed: int) -> Start:
        """Ask the question; nothing in this environment is random."""
        messages: list[ChatMessage] = []
        if self._options.system_prompt:
            messages.append({"role": "system", "content": self._options.system_prompt})
        messages.append({"role": "user", "content": str(task["prompt"])})
        return Start(state={} if self._options.has_own_reward else {"answer": str(task["answer"])}, messages=messages)

    def step(self, state: State, action: str) -> Step:
        """Have the answer graded; the episode is over."""
        job = self._own_reward(action) if self._options.has_own_reward else self._comparison(state, action)
        return Step(state=state, messages=[], reward=job, done=True)

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
    if not options.has_own_reward and not options.answer_column:
        raise ValueError(
            'answer_column is "", and without an answer there is nothing to compare: set reward or reward_url, or name the '
            "column"
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
    task: Task = {"prompt": _text(record, options.prompt_column)}
    if options.answer_column:
        answer = final_answer(_text(record, options.answer_column), options.answer_marker)
        if not answer:
            raise ValueError(f'no answer after "{options.answer_marker}" in column "{options.answer_column}"')
        task["answer"] = answer
    return plain_task(task | {column: _value(record, column, "task_columns says") for column in options.task_columns})


def _value(record: dict[str, Any], column: str, who_says: str) -> Any:
    if column not in record:
        columns = ", ".join(sorted(record))[:500]
        raise ValueError(f'no column "{column}": there are {columns} ({who_says} which to use)')
    return record[column]


def _text(record: dict[str, Any], column: str) -> str:
    value = _value(record, column, "prompt_column and answer_column say")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f'column "{column}" is {repr(value)[:100]}, not text')
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'column "{column}" is {value}, not a number that can be an answer')
    text = str(value).strip()
    if not text:
        raise ValueError(f'column "{column}" is empty')
    return text
