"""Rows of problems with answers, in the layouts of public sets.

| set | columns | read like this by |
|---|---|---|
| HuggingFaceH4/aime_2024, MATH-500 | problem, answer | huggingface/lighteval, huggingface/open-r1: aime_prompt_fn |
| Maxwell-Jia/AIME_2024 | ID, Problem, Answer | its own card; open-compass and others rename Problem and Answer |
| math-ai/aime24 | problem, solution (ends with a box) | its own card |
| opencompass/AIME2025 | question, answer | open-compass/opencompass: aime2025 |
| GSM8K | question, answer (behind "####") | openai/grade-school-math: dataset.py |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.maths.answers import last_boxed

PROBLEM_COLUMNS: Final = ("problem", "Problem", "question", "prompt")
ANSWER_COLUMNS: Final = ("answer", "Answer")
SOLUTION_COLUMNS: Final = ("solution", "Solution")
NAME_COLUMNS: Final = ("id", "ID", "unique_id")
GSM8K_MARKER: Final = "####"


def problem_in(record: Mapping[str, Any], column: str) -> str:
    """The problem; ``column`` "" looks for it. Raises: ValueError."""
    name = column or next((name for name in PROBLEM_COLUMNS if name in record), "")
    value = _value(record, name, "problem_column", PROBLEM_COLUMNS)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'column "{name}" is {repr(value)[:100]}, not the text of a problem')
    return value.strip()


def answer_in(record: Mapping[str, Any], column: str) -> str:
    """The answer as text, out of its box or from behind its marker; ``column`` "" looks for it. Raises: ValueError."""
    columns = (*ANSWER_COLUMNS, *SOLUTION_COLUMNS)
    name = column or next((name for name in columns if name in record), "")
    value = _value(record, name, "answer_column", columns)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value != value:
        raise ValueError(f'column "{name}" is {repr(value)[:100]}, not an answer')
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    boxed = last_boxed(text)
    if boxed is None and name in SOLUTION_COLUMNS:
        raise ValueError(
            f'column "{name}" has no \\boxed{{...}} with an answer: name the column of answers in answer_column'
        )
    answer = boxed if boxed is not None else text.rpartition(GSM8K_MARKER)[2].strip().strip("$")
    if not answer:
        raise ValueError(f'column "{name}" has no answer')
    return answer


def name_in(record: Mapping[str, Any]) -> str:
    """What the row is called; "" where it has no name."""
    return next((str(record[name]) for name in NAME_COLUMNS if record.get(name) is not None), "")


def _value(record: Mapping[str, Any], name: str, option: str, known: tuple[str, ...]) -> Any:
    if name not in record:
        there = ", ".join(sorted(map(str, record)))[:300]
        raise ValueError(f"no column {name or ' or '.join(known)}: there are {there} ({option} says which to use)")
    return record[name]
