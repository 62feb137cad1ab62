"""How a row of a question with an answer is laid out, told by its columns as public sets have them.

| layout | columns | read like this by |
|---|---|---|
| verl, DAPO | prompt, reward_model.ground_truth, data_source | volcengine/verl: utils/dataset/rl_dataset.py |
| Skywork | the same; ground_truth is a JSON list, of which any is right | SkyworkAI/Skywork-OR1: hf_math_verify.py |
| SkyRL | prompt, reward_spec.ground_truth | NovaSky-AI/SkyRL: its data format |
| GSM8K | question, answer (behind "####") | openai/grade-school-math: dataset.py |
| OlympiadBench | question, context, final_answer, unit, error | OpenBMB/OlympiadBench: inference/judge.py |
| NuminaMath | problem, answer, question_type | NVIDIA-NeMo/RL: numinamath.py |
| ORZ | two messages, the second with ground_truth.value | Open-Reasoner-Zero: playground |
| chat | messages that end with the assistant's answer | OpenAI's and ShareGPT's forms |
| question and answer | one of each kind below: AIME, MATH-500, DeepScaleR, Big-Math, TRL | huggingface/lighteval, trl |
| conversation and answer | the same, and the prompt is messages | huggingface/trl: dataset formats |
| multiple choice | a question, its options (offered.py), which one is right | EleutherAI/lm-evaluation-harness: tasks |
| Countdown | nums, target | Jiayi-Pan/TinyZero: examples/data_preprocess/countdown.py |
| reading | a question, what it is about (passages.py), an answer | the same |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gspo_services.tasks.environments.maths.offered import CHOICE_GOLDS, Offered, offered_in, place_of
from gspo_services.tasks.environments.maths.passages import INPUT, passage_columns
from gspo_services.tasks.environments.sources import Roles, column_of

PROMPT_COLUMNS: Final = ("question", "Question", "problem", "Problem", "prompt", "instruction", "query", "input")
OTHER_PROMPTS: Final = ("question_stem", "puzzle", "ctx", "goal", "sentence")
"""They ask where none of the others is there."""
CHAT_COLUMNS: Final = ("messages", "conversations", "conversation")
ANSWER_COLUMNS: Final = (
    "answer", "Answer", "final_answer", "expected_answer", "reference_answer", "ground_truth", "gold", "target", "label",
)  # fmt: skip
SOLUTION_COLUMNS: Final = ("solution", "Solution", "completion", "output", "response")
"""They may hold a whole solution, at whose end the answer stands."""
SPAN_COLUMNS: Final = ("answers", "answers_spans")
"""SQuAD's and DROP's: several of which each is right."""
NESTED_ANSWERS: Final = (("reward_model", "verl"), ("reward_spec", "SkyRL"))
OLYMPIAD_COLUMNS: Final = ("context", "unit")
COUNTDOWN_COLUMNS: Final = ("nums", "target")
LAST_MESSAGE: Final = "the last message"
GSM8K_MARKER: Final = "####"


class QuestionLayout(NamedTuple):
    """Where a row has its question and its answer."""

    name: str
    prompt: str
    answer: str
    """A column, ``LAST_MESSAGE``, or "" for a row without an answer."""
    context: tuple[str, ...] = ()
    """Columns that are shown beside the question."""
    offered: Offered | None = None
    """The options of a multiple choice."""

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns that the policy sees."""
        return (*self.context, self.prompt, *(self.offered.columns if self.offered else ()))

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(filter(None, (self.prompt, self.answer)))})"


class Columns(NamedTuple):
    """What the options say about a row."""

    prompt: str = ""
    answer: str = ""
    """Columns; "" recognises them."""
    prompt_option: str = "prompt_column"
    answer_option: str = "answer_column"
    gold_marker: str = "auto"
    needs_answer: bool = True
    choices: str = "auto"
    context: tuple[str, ...] = ("auto",)
    """See ``offered_in`` and ``passage_columns``."""


def layout_of(record: Mapping[str, Any], columns: Columns) -> QuestionLayout:
    """Raises: ValueError for a row that no layout fits, or two; the text names the option that decides."""
    if not (columns.prompt or columns.answer) and is_countdown(record):
        return QuestionLayout("Countdown", *COUNTDOWN_COLUMNS)
    prompt = columns.prompt or _prompt_column(record, columns)
    offered = offered_in(record, columns.choices)
    answer = columns.answer or (_right_option(record, offered) if offered else "") or _answer_column(record, prompt, columns)
    name = _name(record, prompt, answer, columns)
    context = () if name == "OlympiadBench" else passage_columns(record, prompt, columns.context)
    if name in _PLAIN_NAMES and (offered or (context and answer)):
        name = "multiple choice" if offered else "reading"
    return QuestionLayout(name, prompt, answer, context, offered)


def roles_of(layout: QuestionLayout, used: tuple[str, ...] = ()) -> Roles:
    """What becomes of the columns of a row that is laid out so. ``used``: those that go with the task."""
    gold = layout.prompt if layout.answer == LAST_MESSAGE else layout.answer
    beside = OLYMPIAD_COLUMNS if layout.name == "OlympiadBench" else ()
    return Roles((*layout.shown, *beside), (gold,), used)


_PLAIN_NAMES: Final = ("question and answer", "question")


def _right_option(record: Mapping[str, Any], offered: Offered) -> str:
    """The column that says which option is right; "" where none does. Raises: ValueError for two that contradict."""
    if offered.right is not None:
        return offered.columns[0]
    found: dict[str, int] = {}
    for name in _there(record, CHOICE_GOLDS):
        try:
            found[name] = place_of(record[name], name, offered)
        except ValueError:
            # It may say something else; the last one is refused by its name if none names an option.
            continue
    if len({*found.values()}) > 1:
        raise ValueError(f"columns {' and '.join(found)} name different options: say in answer_column which one is right")
    return next(iter(found), "")


def is_countdown(record: Mapping[str, Any]) -> bool:
    """Whether a row is numbers and a target, and asks nothing in words."""
    numbers, target = (record.get(name) for name in COUNTDOWN_COLUMNS)
    if not (isinstance(numbers, list) and isinstance(target, int) and all(isinstance(each, int) for each in numbers)):
        return False
    return not _there(record, (*PROMPT_COLUMNS, *CHAT_COLUMNS))


def is_marked(value: object) -> bool:
    """Whether a gold stands behind GSM8K's marker."""
    return isinstance(value, str) and GSM8K_MARKER in value


def _prompt_column(record: Mapping[str, Any], columns: Columns) -> str:
    found = _there(record, PROMPT_COLUMNS) or _there(record, CHAT_COLUMNS) or _there(record, OTHER_PROMPTS)[:1]
    if tuple(found) == INPUT:
        return INPUT[0]
    # One that is empty is named as such later.
    found = found or [name for name in (*PROMPT_COLUMNS, *CHAT_COLUMNS) if name in record][:1]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"columns {' and '.join(found)} could each be the question: say in {columns.prompt_option} which one is"
        )
    known = " or ".join((*PROMPT_COLUMNS, *CHAT_COLUMNS))
    raise ValueError(f"no column {known}: there are {_names(record)} ({columns.prompt_option} says which to use)")


def _answer_column(record: Mapping[str, Any], prompt: str, columns: Columns) -> str:
    for outer, _ in NESTED_ANSWERS:
        inner = record.get(outer)
        if isinstance(inner, dict) and "ground_truth" in inner:
            return f"{outer}.ground_truth"
    groups = [[name for name in names if name != prompt] for names in (ANSWER_COLUMNS, SOLUTION_COLUMNS, SPAN_COLUMNS)]
    found = next(filter(None, (_there(record, names) for names in groups)), [])
    if not found and isinstance(record.get(prompt), list) and ends_with_answer(record[prompt]):
        return LAST_MESSAGE
    # A column that is empty in this row, and the only one of its kind, is a row without its answer.
    found = found or next(filter(None, ([name for name in names if name in record] for names in groups)), [])
    if len(found) == 1:
        return found[0]
    if found and columns.needs_answer:
        raise ValueError(
            f"columns {' and '.join(found)} could each be the answer: say in {columns.answer_option} which one is"
        )
    if not columns.needs_answer:
        return ""
    known = " or ".join((*ANSWER_COLUMNS, *SOLUTION_COLUMNS, *SPAN_COLUMNS))
    raise ValueError(f"no column {known}: there are {_names(record)} ({columns.answer_option} says which to use)")


def ends_with_answer(messages: Sequence[Any]) -> bool:
    """Whether a conversation goes on to what its assistant answered."""
    last = messages[-1] if len(messages) > 1 else None
    return isinstance(last, dict) and str(last.get("role", last.get("from"))).lower() in ("assistant", "gpt")


def _name(record: Mapping[str, Any], prompt: str, answer: str, columns: Columns) -> str:
    nested = next((name for outer, name in NESTED_ANSWERS if answer == f"{outer}.ground_truth"), None)
    if nested is not None:
        return nested
    asked = value_at(record, prompt)
    if answer == LAST_MESSAGE:
        return "ORZ" if isinstance(asked, list) and "ground_truth" in asked[-1] else "chat"
    if answer == "final_answer" and "is_multiple_answer" in record:
        return "OlympiadBench"
    if {"question_type", "problem_is_valid"} <= record.keys():
        return "NuminaMath"
    if columns.gold_marker == "auto" and is_marked(value_at(record, answer)):
        return "GSM8K"
    what = "conversation" if isinstance(asked, list) else "question"
    return f"{what} and answer" if answer else what


def value_at(record: Mapping[str, Any], column: str) -> Any:
    """The value of a column, which may be inside another; None where there is none."""
    try:
        return column_of(dict(record), column, "") if column else None
    except ValueError:
        return None


def _there(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Columns that say something. In a table of rows of several layouts those of the others are empty."""
    return [name for name in names if record.get(name) not in (None, "", [])]


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, record)))[:300]
