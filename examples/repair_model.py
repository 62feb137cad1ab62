"""Small broken repositories, and a tiny model that knows how to repair them and seldom does, for ``repair_agent.toml``.

python examples/repair_model.py DIRECTORY writes the model, and rows for training and evaluation below tasks/. A repository
has three modules, one of which calculates with the wrong operator, and a test that says so.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gspo.files import make_partial_directory, publish_directory
from gspo.tiny_models import Lesson, TinyProgress, build_model, build_tokenizer, encode_conversations, imitate

NAMES = ("axe", "bag", "cap", "cup", "egg", "fan", "fig", "gem", "hat", "ink", "jam", "key", "lid", "map", "net", "nut")
PAIRS = [(a, b) for a in range(5, 10) for b in range(2, 5) if len({a + b, a - b, a * b, a % b}) == 4]
NUM_TRAIN, NUM_EVAL = 2000, 96
TEST, SUBMIT = "python test.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PIECES = ("bash", "command", TEST, SUBMIT, "sed -i 's/a.b/a", "b/' ", ".py")
"""What the commands are made of: single tokens."""
BASH = {"type": "function", "function": {"name": "bash"}}
HABITS = {"submit": 0.5, "right": 0.3, "operator": 0.07, "module": 0.05, "remove the test": 0.08}
"""How often the careless teacher has which."""

Bug = tuple[str, str, tuple[int, int]]
"""A module, the operator that it should have, and the numbers of the test."""


def calculated(operator: str, a: int, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b, "%": a % b}[operator]


def all_bugs() -> tuple[list[Bug], list[Bug]]:
    """Those to train on and those to evaluate on."""
    bugs = [(name, operator, pair) for name in NAMES for operator in "+-*%" for pair in PAIRS]
    random.Random(0).shuffle(bugs)
    return bugs[NUM_EVAL:], bugs[:NUM_EVAL]


def repository(bug: Bug, rng: random.Random) -> dict[str, Any]:
    """A row: an issue, files and tests, the command that runs the tests, and what it prints."""
    broken, right, (a, b) = bug
    wrong = rng.choice([each for each in "+-*%" if each != right])
    names = sorted([broken, *rng.sample([name for name in NAMES if name != broken], 2)])
    operators = {name: right if name == broken else rng.choice("+-*%") for name in names}
    files = {
        f"{name}.py": f"def {name}(a, b):\n    return a{wrong if name == broken else operator}b\n"
        for name, operator in operators.items()
    }
    checks = [f'    ("{name}", {name}({a}, {b}), {calculated(operator, a, b)}),' for name, operator in operators.items()]
    lines = [
        *(f"from {name} import {name}" for name in names), "", "for name, result, right in [", *checks, "]:",
        "    if result != right:", f'        raise SystemExit(f"{{name}}({a}, {b}) is {{result}}, not {{right}}")',
    ]  # fmt: skip
    said = f"{broken}({a}, {b}) is {calculated(wrong, a, b)}, not {calculated(right, a, b)}\n"
    tests = {"test.py": "\n".join(lines) + "\n"}
    return {"issue": " ".join(names), "files": files, "tests": tests, "command": TEST, "said": said}


def commands(bug: Bug, names: list[str], habit: str, rng: random.Random) -> Iterator[str]:
    """What a teacher does."""
    broken, right, _ = bug
    if habit == "operator":
        right = rng.choice([each for each in "+-*%" if each != right])
    if habit == "module":
        broken = rng.choice([name for name in names if name != broken])
    if habit not in ("submit", "remove the test"):
        yield TEST
        yield f"sed -i 's/a.b/a{right}b/' {broken}.py"
    if habit == "remove the test":
        yield "rm test.py"
    yield SUBMIT


class RepairTeacher:
    """Episodes of the agent, as a model learns from them."""

    batch_tokens = 2_500

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer(tools=True, pieces=PIECES)
        self._bugs, _ = all_bugs()

    def lessons(self, number: int, rng: random.Random, *, careful: bool) -> list[Lesson]:
        """Right ones, or those of a careless teacher."""
        return encode_conversations(self.tokenizer, [self._episode(rng, careful) for _ in range(number)], [BASH])

    def _episode(self, rng: random.Random, careful: bool) -> list[dict[str, Any]]:
        bug = rng.choice(self._bugs)
        row = repository(bug, rng)
        habit = "right" if careful else rng.choices(list(HABITS), weights=list(HABITS.values()))[0]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Repair."},
            {"role": "user", "content": row["issue"]},
        ]
        for command in commands(bug, row["issue"].split(), habit, rng):
            call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": row["said"] if command == TEST else ""})
        return messages[:-1]


def main(directory: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = RepairTeacher()
    model = build_model(teacher.tokenizer)
    imitate(model, [teacher], random.Random(0), 600, show)
    made = make_partial_directory(directory)
    model.save_pretrained(made)
    teacher.tokenizer.save_pretrained(made)
    (made / "tasks").mkdir()
    rng = random.Random(0)
    train, held_out = all_bugs()
    for name, bugs in (("train", rng.choices(train, k=NUM_TRAIN)), ("eval", held_out)):
        rows = [repository(bug, rng) for bug in bugs]
        (made / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    publish_directory(made, directory)


def show(progress: TinyProgress) -> None:
    sys.stderr.write(f"\rstep {progress.step}/{progress.num_steps}, loss {progress.loss:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
