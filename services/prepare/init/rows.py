"""Rows of a new project: the person's own, looked into and split, or samples."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from gspo_services.shared.runtime.errors import ConfigurationError

PROMPT_COLUMNS: Final = ("question", "prompt", "problem", "instruction", "input", "query")
ANSWER_COLUMNS: Final = ("answer", "solution", "target", "output", "label", "response")
MARKER: Final = "####"
"""GSM8K's, before the answer."""
HELD_OUT_ONE_IN: Final = 10
MOST_HELD_OUT: Final = 256
MOST_BYTES: Final = 2 * 2**30
TINY_ROWS: Final = (512, 64)
SAMPLE_ROWS: Final = (256, 64)
"""For training and held out."""


@dataclass(frozen=True, kw_only=True)
class TaskRows:
    """The tasks of both splits."""

    train: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    prompt_column: str
    answer_column: str
    """Empty: there is none."""
    train_path: str
    eval_path: str
    """As the configuration has them."""
    is_written: bool
    """Both files are written by us."""

    @property
    def prompts(self) -> list[str]:
        """Of all rows."""
        return [str(row[self.prompt_column]) for row in (*self.train, *self.held_out)]

    @property
    def is_marked(self) -> bool:
        """Whether each answer ends behind the marker."""
        return all(MARKER in str(row[self.answer_column]) for row in (*self.train, *self.held_out))


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


def own_rows(data: Path, eval_data: Path | None, prompt_column: str, answer_column: str, *, needs_answer: bool) -> TaskRows:
    """The rows of the person's files; without ``eval_data`` one in ten is held out, and both splits are written anew.

    Raises: ConfigurationError that names the file, the line or the column, and the way out.
    """
    train = list(_read(data))
    prompt = prompt_column or _guess(data, train[0], PROMPT_COLUMNS, "--prompt-column")
    found = next((name for name in ANSWER_COLUMNS if name in train[0] and name != prompt), "")
    answer = answer_column or found
    if needs_answer and not answer:
        raise ConfigurationError(
            f"{data}: which column has the answer? There are {_columns(train[0])}: --answer-column NAME"
        )
    held_out = list(_read(eval_data)) if eval_data is not None else train[::HELD_OUT_ONE_IN][:MOST_HELD_OUT]
    if eval_data is None:
        if len(train) < 2:
            raise ConfigurationError(f"{data} has {len(train)} row: give at least two, or --eval-data FILE")
        train = [
            row for index, row in enumerate(train) if index % HELD_OUT_ONE_IN or index // HELD_OUT_ONE_IN >= MOST_HELD_OUT
        ]
    for path, rows in ((data, train), (eval_data or data, held_out)):
        for column in filter(None, (prompt, answer)):
            missing = next((number for number, row in enumerate(rows, start=1) if column not in row), None)
            if missing is not None:
                raise ConfigurationError(
                    f"{path}: row {missing} has no column {column!r}: there are {_columns(rows[missing - 1])}"
                )
    return TaskRows(
        train=train, held_out=held_out, prompt_column=prompt, answer_column=answer,
        train_path="data/train.jsonl" if eval_data is None else str(data.absolute()),
        eval_path="data/eval.jsonl" if eval_data is None else str(eval_data.absolute()),
        is_written=eval_data is None,
    )  # fmt: skip


def _guess(path: Path, row: Mapping[str, Any], names: tuple[str, ...], option: str) -> str:
    found = next((name for name in names if name in row), None)
    if found is None:
        raise ConfigurationError(f"{path}: which column has the prompt? There are {_columns(row)}: {option} NAME")
    return found


def _columns(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(str(name) for name in row))[:300] or "none"


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    """Raises: ConfigurationError."""
    if path.suffix != ".jsonl":
        raise ConfigurationError(
            f"{path} is no .jsonl file: one JSON object a line. A Parquet file is named in run.toml afterwards"
        )
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigurationError(
                f"{path} has {size / 2**30:.1f} GiB: give --eval-data too, or name the file in run.toml"
            )
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    empty = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path}, line {number}: not JSON ({error}): correct it or take it out") from error
        if not isinstance(row, dict):
            raise ConfigurationError(f"{path}, line {number}: a JSON object is needed, found {type(row).__name__}")
        empty = False
        yield row
    if empty:
        raise ConfigurationError(f"{path} has no row: one JSON object a line")


def as_jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows, one a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
