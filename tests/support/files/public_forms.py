"""Small files in the forms in which public sets are published: their columns, our rows.

Each form has answers with the score that the set's own scorer gives them. tests/parity runs those scorers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow
import pyarrow.parquet

NUM_ROWS: Final = 8
Row = Any
Writer = Callable[[Path, Sequence[Row]], None]


def parquet(path: Path, rows: Sequence[Row]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def json_lines(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def json_array(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps(list(rows), indent=4), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A published form."""

    file: str
    row: Callable[[int], Row]
    """Row ``i`` asks for i + 7, unless ``gold`` says otherwise."""
    layout: str
    """As ``gspo check`` says it."""
    right: str
    """The policy's text, with the gold at {}."""
    scorer: str
    """What of others scores it, in tests/parity; "" where they publish none that can be installed."""
    write: Writer = json_lines
    gold: Callable[[int], str] = field(default=lambda i: str(i + 7))
    more: Mapping[str, float] = field(default_factory=dict)
    """More texts with their score for row 0, whose gold is 7."""
    times: int = 1
    """How often the file has each row."""
    integers: bool = True

    def written(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file
        self.write(path, [self.row(i) for i in range(NUM_ROWS)] * self.times)
        return path

    def answers(self) -> list[tuple[int, str, float]]:
        """Row, text of the policy, score."""
        own = [(i, self.right.format(self.gold(i)), 1.0) for i in range(2)]
        wrong = [(0, self.right.format(self.gold(1)), 0.0), (1, self.right.format("1" + self.gold(1)), 0.0)]
        return [*own, *wrong, *((0, text, score) for text, score in self.more.items())]


def question(name: str, i: int) -> str:
    """Different in every form and every row: the same question would be the same task."""
    return f"{name} {i}: what is {i}+7?"


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _verl(name: str, source: str, prompt: str) -> Callable[[int], Row]:
    def row(i: int) -> Row:
        return {
            "data_source": source,
            "prompt": _user(prompt.format(question(name, i))),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 7)},
            "extra_info": {"split": "train", "index": i},
        }

    return row


DAPO_PROMPT: Final = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
BOX: Final = "So it is $\\boxed{{{}}}$."
FORMS: Final[Mapping[str, Form]] = {
    "verl GSM8K": Form(
        file="verl_gsm8k.parquet",
        write=parquet,
        layout="verl (prompt, reward_model.ground_truth)",
        scorer="verl gsm8k",
        row=_verl("verl GSM8K", "openai/gsm8k", '{} Let\'s think step by step and output the final answer after "####".'),
        right="We add.\n#### {}",
    ),
    "DAPO": Form(
        file="dapo.parquet",
        write=parquet,
        times=3,
        layout="verl (prompt, reward_model.ground_truth)",
        scorer="verl math_dapo",
        row=_verl("DAPO", "math_dapo", DAPO_PROMPT),
        right="12 is not it.\nAnswer: {}",
        more={"So\nAnswer: $7$": 1.0, "Then answer : 7": 1.0, "Answer: 8\nAnswer: 7": 1.0, "So \\boxed{7}": 1.0},
    ),
    "verl MATH": Form(
        file="verl_math.parquet",
        write=parquet,
        layout="verl (prompt, reward_model.ground_truth)",
        scorer="verl math_reward",
        row=_verl(
            "verl MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "{} Let's think step by step and output the final answer within \\boxed{{}}.",
        ),
        right=BOX,
    ),
    "Skywork": Form(
        file="skywork.parquet",
        write=parquet,
        layout="verl (prompt, reward_model.ground_truth)",
        scorer="math-verify, any",
        row=lambda i: {
            "data_source": "train-math-numinamath1.5_olympiads",
            "prompt": _user(question("Skywork", i)),
            "ability": "math",
            "reward_model": {
                "ground_truth": json.dumps([str(i + 7), str(i + 107)]),
                "style": "rule",
            },
            "extra_info": {"index": i, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 3}},
        },
        right=BOX,
        more={"It is $\\boxed{107}$.": 1.0},
    ),
    "SkyRL": Form(
        file="skyrl.parquet",
        write=parquet,
        layout="SkyRL (prompt, reward_spec.ground_truth)",
        scorer="",
        row=lambda i: {
            "data_source": "own",
            "prompt": _user(question("SkyRL", i) + " Put it within \\boxed{}."),
            "env_class": "aime",
            "reward_spec": {"method": "rule", "ground_truth": str(i + 7)},
            "extra_info": {"index": i},
        },
        right=BOX,
    ),
    "GSM8K of OpenAI": Form(
        file="gsm8k.jsonl",
        layout="GSM8K (question, answer)",
        scorer="verl gsm8k",
        row=lambda i: {
            "question": question("GSM8K of OpenAI", i),
            "answer": f"We add: {i} + 7 = <<{i}+7={i + 7}>>{i + 7}.\n#### {i + 7}",
        },
        right="We add.\n#### {}",
    ),
    "DeepScaleR": Form(
        file="deepscaler.json",
        write=json_array,
        layout="question and answer (problem, answer)",
        scorer="math-verify",
        row=lambda i: {"problem": question("DeepScaleR", i), "answer": str(i + 7), "solution": f"It is \\boxed{{{i + 7}}}."},
        right=BOX,
    ),
    "Big-Math": Form(
        file="big_math.parquet",
        write=parquet,
        layout="question and answer (problem, answer)",
        scorer="math-verify",
        row=lambda i: {
            "problem": question("Big-Math", i),
            "answer": str(i + 7),
            "source": "own",
            "domain": ["Mathematics -> Algebra"],
            "llama8b_solve_rate": 0.5,
        },
        right=BOX,
    ),
    "NuminaMath": Form(
        file="numina.parquet",
        write=parquet,
        layout="NuminaMath (problem, answer)",
        scorer="math-verify",
        row=lambda i: {
            "problem": question("NuminaMath", i),
            "solution": "Add.",
            "answer": str(i + 7),
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "problem_is_valid": "Yes",
            "solution_is_valid": "Yes",
            "source": "own",
            "synthetic": False,
        },
        right=BOX,
    ),
    "OlympiadBench": Form(
        file="OE_TO_maths_en_COMP.json",
        write=json_array,
        layout="OlympiadBench (question, final_answer)",
        scorer="",
        row=lambda i: {
            "id": i,
            "subfield": "Algebra",
            "context": None,
            "question": question("OlympiadBench", i),
            "solution": ["Add."],
            "final_answer": [f"${i + 7}$"],
            "is_multiple_answer": False,
            "unit": None,
            "answer_type": "Numerical",
            "error": None,
        },
        right="So the final answer is $\\boxed{{{}}}$.",
    ),
    "ORZ": Form(
        file="orz_math_57k_collected.json",
        write=json_array,
        layout="ORZ (conversations, the last message)",
        scorer="math-verify",
        row=lambda i: [
            {"from": "human", "value": question("ORZ", i)},
            {"from": "assistant", "ground_truth": {"value": str(i + 7), "pass_at_n": None}},
        ],
        right=BOX,
    ),
    "TRL standard": Form(
        file="trl_standard.jsonl",
        layout="question and answer (prompt, solution)",
        scorer="trl",
        row=lambda i: {"prompt": question("TRL standard", i), "solution": str(i + 7)},
        right=BOX,
    ),
    "TRL conversational": Form(
        file="trl_conversational.jsonl",
        layout="conversation and answer (prompt, solution)",
        scorer="trl",
        row=lambda i: {"prompt": _user(question("TRL conversational", i)), "solution": f"$\\frac{{{2 * i + 14}}}{{2}}$"},
        right=BOX,
        integers=False,
    ),
    "OpenAI chat": Form(
        file="openai_chat.jsonl",
        layout="chat (messages, the last message)",
        scorer="math-verify",
        row=lambda i: {"messages": [*_user(question("OpenAI chat", i)), {"role": "assistant", "content": str(i + 7)}]},
        right=BOX,
    ),
    "ShareGPT": Form(
        file="sharegpt.jsonl",
        layout="chat (conversations, the last message)",
        scorer="math-verify",
        row=lambda i: {
            "conversations": [
                {"from": "human", "value": question("ShareGPT", i)},
                {"from": "gpt", "value": f"So \\boxed{{{i + 7}}}."},
            ]
        },
        right=BOX,
    ),
    "AIME of HuggingFaceH4": Form(
        file="aime_h4.parquet",
        write=parquet,
        layout="question and answer (problem, answer)",
        scorer="math-verify",
        row=lambda i: {
            "id": 60 + i,
            "problem": question("AIME of HuggingFaceH4", i),
            "solution": f"So \\boxed{{{i + 7:03d}}}.",
            "answer": f"{i + 7:03d}",
            "url": "u",
            "year": "2024",
        },
        right=BOX,
    ),
    "AIME of Maxwell-Jia": Form(
        file="aime_mj.parquet",
        write=parquet,
        layout="question and answer (Problem, Answer)",
        scorer="math-verify",
        row=lambda i: {"ID": f"2024-I-{i}", "Problem": question("AIME of Maxwell-Jia", i), "Solution": "x", "Answer": i + 7},
        right=BOX,
    ),
    "AIME of math-ai": Form(
        file="aime_mathai.parquet",
        write=parquet,
        layout="question and answer (problem, solution)",
        scorer="math-verify",
        row=lambda i: {"id": i, "problem": question("AIME of math-ai", i), "solution": f"\\boxed{{{i + 7}}}", "url": "u"},
        right=BOX,
    ),
}
