"""Questions with known answers, from a JSONL or Parquet file; the answer is compared as mathematics.

GSM8K's files work as they are: columns ``question`` and ``answer``, where the final answer follows "####".
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gspo.environments import ChatMessage, Environment, RewardJob, Split, Start, State, Step, Task, TaskSource
from services.environments.rows import OnBadRow, usable_rows

VERIFY_ANSWER = "services.reward_worker.mathematics:verify_answer"


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the questions, and how they are asked."""

    train_path: str = ""
    """File of the training split, *.jsonl or *.parquet; "" when there is none."""
    eval_path: str = ""
    """File of the held-out split, likewise."""
    prompt_column: str = "question"
    answer_column: str = "answer"
    answer_marker: str = "####"
    """The final answer follows the last marker, in the file and in the policy's text; "" takes the whole text. Without the
    marker the policy's whole text is judged."""
    system_prompt: str = "Solve the problem step by step. Give the final answer after ####."
    """The system message; "" for none."""
    on_bad_row: OnBadRow = "error"
    """A row without a usable question or answer stops the run, or is counted and left out."""
    reward_deadline_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """Wall-clock seconds for comparing one answer; a longer comparison is killed and gives no reward."""


class DatasetRow(msgspec.Struct, frozen=True):
    """One usable row."""

    prompt: str
    answer: str


class DatasetState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode before its only turn."""

    answer: str


class Dataset(Environment):
    """One question, one answer; math-verify compares it in a reward worker: 1 or 0."""

    options_type = DatasetOptions

    def __init__(self, options: DatasetOptions) -> None:
        self._options = options

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's file, in its order. Raises: ValueError that names the file and line of a bad row."""
        name = f"{split}_path"
        path = self._options.train_path if split == "train" else self._options.eval_path
        if not path:
            raise ValueError(f"the dataset environment needs {name} for its {split} split: name a .jsonl or .parquet file")
        return RowTasks(load_rows(Path(path), self._options))

    def start(self, task: Task, seed: int) -> Start:
        """Ask the question; nothing in this environment is random."""
        messages: list[ChatMessage] = []
        if self._options.system_prompt:
            messages.append({"role": "system", "content": self._options.system_prompt})
        messages.append({"role": "user", "content": str(task["prompt"])})
        return Start(state={"answer": str(task["answer"])}, messages=messages)

    def step(self, state: State, action: str) -> Step:
        """Give the answer to a comparison; the episode is over."""
        gold = msgspec.convert(state, DatasetState).answer
        said = final_answer(action, self._options.answer_marker)
        job = RewardJob(
            function=VERIFY_ANSWER,
            arguments={"gold": gold, "answer": action if said is None else said},
            deadline_s=self._options.reward_deadline_s,
        )
        return Step(state=state, messages=[], reward=job, done=True)


class RowTasks:
    """A ``TaskSource`` over rows in memory."""

    def __init__(self, rows: list[DatasetRow]) -> None:
        self._rows = rows

    @property
    def num_tasks(self) -> int:
        """How many usable rows there are."""
        return len(self._rows)

    def task(self, index: int) -> Task:
        """{"prompt": text, "answer": text} of row ``index``. Raises: IndexError outside 0 .. num_tasks - 1."""
        if not 0 <= index < len(self._rows):
            raise IndexError(f"task {index} does not exist: there are {len(self._rows)}")
        return {"prompt": self._rows[index].prompt, "answer": self._rows[index].answer}


def load_rows(path: Path, options: DatasetOptions) -> list[DatasetRow]:
    """The usable rows of ``path``.

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


def _row(record: dict[str, Any], options: DatasetOptions) -> DatasetRow:
    """The row in ``record``. Raises: ValueError with what is wrong."""
    prompt = _text(record, options.prompt_column)
    text = _text(record, options.answer_column)
    answer = final_answer(text, options.answer_marker)
    if not answer:
        raise ValueError(f'no answer after "{options.answer_marker}" in column "{options.answer_column}"')
    return DatasetRow(prompt=prompt, answer=answer)


def _text(record: dict[str, Any], column: str) -> str:
    if column not in record:
        columns = ", ".join(sorted(record))[:500]
        raise ValueError(f'no column "{column}": there are {columns} (prompt_column and answer_column say which to use)')
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f'column "{column}" is {repr(value)[:100]}, not text')
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'column "{column}" is {value}, not a number that can be an answer')
    text = str(value).strip()
    if not text:
        raise ValueError(f'column "{column}" is empty')
    return text
