"""Rows of a new project: the person's own, looked into and split, or samples."""

from __future__ import annotations

import glob
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gspo.tasks.environments import Split
from gspo_services.prepare.init.choices import NEED_ANSWERS, Kind
from gspo_services.prepare.tiny_models import small_problems
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.paths import way_to_rows
from gspo_services.tasks.environments import (
    Accounting,
    Columns,
    ColumnUse,
    QuestionLayout,
    as_mapping,
    files_of,
    layout_of,
    program_row,
    read_question,
    roles_of,
    rows_of,
)

HELD_OUT_ONE_IN: Final = 10
MOST_HELD_OUT: Final = 256
MOST_BYTES: Final = 2 * 2**30
TINY_ROWS: Final = (512, 64)
SAMPLE_ROWS: Final = (256, 64)
"""For training and held out."""
PROGRAM: Final = "Write a Python program that reads two numbers from one line, takes the {}, and prints the result."
PROGRAMS: Final = QuestionLayout("programs", "", "")


@dataclass(frozen=True, kw_only=True)
class TaskRows:
    """The tasks of both splits."""

    train: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    prompt_column: str
    """Empty: rows of programs, each of which tells its own layout."""
    answer_column: str
    """Empty: there is none."""
    train_path: str
    eval_path: str
    """As the configuration has them."""
    is_written: bool
    """Both files are written by us."""

    @property
    def _named(self) -> Columns:
        return Columns(self.prompt_column, self.answer_column, needs_answer=False)

    @property
    def columns(self) -> ColumnUse | None:
        """What becomes of the columns; None for rows of programs."""
        if not self.prompt_column:
            return None
        account = Accounting(lambda row: roles_of(layout_of(row, self._named)))
        for row in (*self.train, *self.held_out):
            account.take(row)
        return account.use

    @property
    def prompts(self) -> list[str]:
        """Of all rows, with passages and options; a conversation is one text. Raises: ConfigurationError."""
        return [self._prompt(row) for row in (*self.train, *self.held_out)]

    def _prompt(self, row: Mapping[str, Any]) -> str:
        if self.prompt_column:
            asked = Columns(self.prompt_column, needs_answer=False)
            try:
                return _text(read_question(dict(row), asked, compared=False).prompt)
            except ValueError as error:
                raise ConfigurationError(f"{self.train_path}: {error}") from error
        problem = program_row(row, "")
        return problem.statement or _text(problem.messages)


def _text(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(str(each.get("content", each.get("value"))) for each in prompt if isinstance(each, dict))


def sample_rows(*, tiny: bool) -> TaskRows:
    """Sums that the tiny model knows, or short problems in words; no row is in both splits."""
    rng = random.Random(0)
    pairs = [(first, second) for first in range(50) for second in range(50)]
    rng.shuffle(pairs)
    num_train, num_eval = TINY_ROWS if tiny else SAMPLE_ROWS
    rows = [_tiny_row(*pair) if tiny else _sample_row(*pair, rng) for pair in pairs[: num_train + num_eval]]
    return TaskRows(
        train=rows[:num_train], held_out=rows[num_train:], prompt_column="question", answer_column="answer",
        train_path="data/train.jsonl", eval_path="data/eval.jsonl", is_written=True,
    )  # fmt: skip


def _tiny_row(first: int, second: int) -> dict[str, str]:
    return {"question": f"{first}+{second}=", "answer": str(first + second)}


def _sample_row(first: int, second: int, rng: random.Random) -> dict[str, str]:
    price, paid = first + 2, 0
    number = second + 2
    if rng.random() < 0.5:
        return {
            "question": f"A pen costs {price} coins. How many coins do {number} pens cost?", "answer": str(price * number)
        }  # fmt: skip
    paid = price * number + rng.randrange(1, 50)
    return {
        "question": f"A pen costs {price} coins. You buy {number} pens and pay {paid} coins. How many coins are returned?",
        "answer": str(paid - price * number),
    }


def sample_programs(*, tiny: bool) -> TaskRows:
    """Problems that the tiny model knows, or the same in words."""
    num_train, num_eval = TINY_ROWS if tiny else SAMPLE_ROWS
    splits: tuple[tuple[Split, int], ...] = (("train", num_train), ("eval", num_eval))
    train, held_out = (
        [row if tiny else {**row, "prompt": PROGRAM.format(row["prompt"])} for row in small_problems(split, number)]
        for split, number in splits
    )
    return TaskRows(
        train=train, held_out=held_out, prompt_column="", answer_column="", train_path="data/train.jsonl",
        eval_path="data/eval.jsonl", is_written=True,
    )  # fmt: skip


def columns_of(kind: Kind, prompt_column: str, answer_column: str) -> Columns | None:
    """What the options say of a row's columns; None: rows of programs, whose layout tells them."""
    if kind == "code":
        return None
    return Columns(
        prompt_column, answer_column, "--prompt-column", "--answer-column", needs_answer=kind in NEED_ANSWERS
    )  # fmt: skip


def own_rows(data: Path, eval_data: Path | None, columns: Columns | None) -> TaskRows:
    """The rows of the person's files. Without ``eval_data`` a folder's own shards for evaluation are taken, or else one row
    in ten is held out, and both splits are written anew.

    Raises: ConfigurationError that names the file, the row or the column, and the way out.
    """
    for option, path in (("--data", data), ("--eval-data", eval_data)):
        if path is not None and not path.exists() and not glob.has_magic(path.name):
            raise ConfigurationError(f"{option}: there is no file or folder {path.absolute()}{way_to_rows(path)}")
    if eval_data is None and _tells_splits(data):
        eval_data = data
    if eval_data is None:
        _require_small(data)
    train, prompt, answer = _read(data, "train", columns)
    if eval_data is not None:
        held_out, *found = _read(eval_data, "eval", columns)
        if found != [prompt, answer]:
            raise ConfigurationError(
                f"{eval_data} has its rows in {' and '.join(found)}, and {data} in {prompt} and {answer}: name "
                "columns that both have: --prompt-column NAME, --answer-column NAME"
            )
    elif len(train) < 2:
        raise ConfigurationError(f"{data} has {len(train)} row: give at least two, or --eval-data FILE")
    else:
        held_out = train[::HELD_OUT_ONE_IN][:MOST_HELD_OUT]
        train = [
            row for index, row in enumerate(train) if index % HELD_OUT_ONE_IN or index // HELD_OUT_ONE_IN >= MOST_HELD_OUT
        ]
    return TaskRows(
        train=train, held_out=held_out, prompt_column=prompt, answer_column=answer,
        train_path="data/train.jsonl" if eval_data is None else str(data.absolute()),
        eval_path="data/eval.jsonl" if eval_data is None else str(eval_data.absolute()),
        is_written=eval_data is None,
    )  # fmt: skip


def _tells_splits(data: Path) -> bool:
    """Whether a folder has rows for evaluation beside those for training."""
    try:
        return set(files_of(data, "train")).isdisjoint(files_of(data, "eval"))
    except ValueError:
        return False


def _require_small(data: Path) -> None:
    """Raises: ConfigurationError for files that are too large to be written anew."""
    try:
        size = sum(path.stat().st_size for path in files_of(data, "train"))
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
    if size > MOST_BYTES:
        raise ConfigurationError(f"{data} has {size / 2**30:.1f} GiB: give --eval-data too, or name the file in run.toml")


def _layout(row: Mapping[str, Any], columns: Columns | None) -> QuestionLayout:
    """Where a row has its question and its answer. Raises: ValueError."""
    if columns is not None:
        return layout_of(row, columns)
    problem = program_row(row, "")
    if not problem.tests and not problem.num_generated:
        raise ValueError("it has no tests, so that no program could be scored")
    return PROGRAMS


def _read(path: Path, split: Split, columns: Columns | None) -> tuple[list[Mapping[str, Any]], str, str]:
    """Each row once, and the columns of the question and the answer. Raises: ConfigurationError."""
    found: dict[str, Mapping[str, Any]] = {}
    layout = None
    try:
        for file, place, record in rows_of(path, split):
            try:
                row = as_mapping(record)
                of_row = _layout(row, columns)
                layout = layout or of_row
                if of_row != layout:
                    raise ValueError(
                        f"it is laid out as {of_row}, and the rows before as {layout}: name the columns that all have"
                    )
                found.setdefault(json.dumps(row, sort_keys=True), row)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(f"{file}, {place}: {error}; correct the row or take it out") from error
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
    if layout is None:
        raise ConfigurationError(f"{path} has no row")
    return list(found.values()), layout.prompt, layout.answer


def as_jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows, one a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
