"""What the ledger adds to the watch over learning: rewards of the same tasks, and answers beside the expected ones."""

import math
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from gspo_services.broker.store import NoLedger, StoreCorrupt
from gspo_services.runs.expected import CHARACTERS, ExpectedAnswers
from gspo_services.runs.reading import OpenRun, RecordedTrajectory, open_run
from gspo_services.shared.learning import LearningOutcome, LearningWatch, Row, Tasks
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import Settings

SHOWN: Final = 3
_ERRORS: Final = (NoLedger, StoreCorrupt, sqlite3.Error, OSError)


@dataclass(frozen=True, kw_only=True)
class ShownAnswer:
    """One answer of the newest batch."""

    trajectory_id: int
    prompt: str
    """Its end."""
    answer: str
    expected: str
    """Empty where it is not known here."""
    reward: float
    ended: str

    def __str__(self) -> str:
        expected = f", expected {self.expected}" if self.expected else ""
        cut = ", cut off" if self.ended == "length" else ""
        return f"{self.prompt} -> {self.answer!r}{expected}: reward {self.reward:.4g}{cut}"


def outcome_of(directory: Path, watch: LearningWatch) -> LearningOutcome:
    """The outcome of a run, task by task where its ledger can be read."""
    if watch.evaluations is None:
        return watch.outcome()
    try:
        with open_run(directory) as run:
            return watch.outcome(compared_tasks(run, watch))
    except _ERRORS:
        return watch.outcome()


def compared_tasks(run: OpenRun, watch: LearningWatch) -> Tasks | None:
    """The rewards of the first and the last evaluation by task; None where the ledger does not have both."""
    if watch.evaluations is None:
        return None
    first, last = (_rewards(run, line) for line in watch.evaluations)
    return (first, last) if first and last else None


def _rewards(run: OpenRun, line: Row) -> dict[int, float]:
    name = str(line.get("set") or "")
    found = [
        each.evaluation_id
        for each in run.evaluations()
        if (each.batch, each.policy_version, each.name) == (line["batch"], line["policy_version"], name)
    ]
    if not found:
        return {}
    rewards: dict[int, float] = {}
    for group in run.groups(split="eval", evaluation=found[-1]):
        known = [member.reward for member in group.members if member.reward is not None]
        if known:
            rewards[group.task_index] = math.fsum(known) / len(known)
    return rewards


def shown_answers(directory: Path, settings: Settings, *, number: int = SHOWN) -> list[ShownAnswer]:
    """Some answers of the newest batch, each to another task; none where the ledger or the tokenizer cannot be read."""
    try:
        tokenizer = Tokenizer.from_file(str(settings.model.path / "tokenizer.json"))
        with open_run(directory) as run:
            groups = run.groups_of_batch(run.facts().num_batches - 1)[:number]
            chosen = [(group.task_index, member) for group in groups for member in group.members[:1]]
            expected = _expected(directory, settings, [task for task, _ in chosen])
            return [_shown(run, tokenizer, member, expected.get(task, "")) for task, member in chosen]
    except Exception:  # noqa: BLE001 - tokenizers raises plain ones, beside what a ledger may.
        return []


def _shown(run: OpenRun, tokenizer: Tokenizer, member: RecordedTrajectory, expected: str) -> ShownAnswer:
    tokens = run.tokens(member.trajectory_id)
    ids, actions = tokens.token_ids_T.tolist(), tokens.is_action_T.tolist()
    begin = actions.index(True) if True in actions else len(ids)
    prompt = one_line(tokenizer.decode(ids[:begin]), 10**6)
    return ShownAnswer(
        trajectory_id=member.trajectory_id,
        prompt=prompt if len(prompt) <= CHARACTERS else f"...{prompt[-CHARACTERS:]}",
        answer=one_line(tokenizer.decode(ids[begin:]), CHARACTERS),
        expected=expected,
        reward=member.reward or 0.0,
        ended=member.finish_reason or "",
    )


def _expected(directory: Path, settings: Settings, indices: list[int]) -> dict[int, str]:
    # reasoning-gym takes seconds to start.
    if settings.environment.name == "reasoning_gym":
        return {}
    return ExpectedAnswers(directory, settings).of("train", indices)[0]
