"""Reads the model's answers from a run's ledger: a few held-out tasks of an evaluation, the same ones each time."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from gspo_services.broker.rows import EvaluationRow, GroupRow, TrajectoryRow
from gspo_services.broker.store import LEDGER_FILE, NoLedger, Payload, Reader, StoreCorrupt, reading
from gspo_services.shared.runtime.plain_text import one_line

SAMPLES: Final = "samples/evaluation"
"""The table's name at a tracker."""
MOST_CHARACTERS: Final = 2000
"""The longest text in a table."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One episode."""

    task: int
    prompt: str
    answer: str
    """Everything after the prompt, including what an environment said."""
    reward: float
    num_tokens: int
    """The number of tokens that the model sampled."""
    ended: str
    """done, or length when a limit cut it off."""


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """The samples of one evaluation."""

    batch: int
    policy_version: int
    samples: tuple[Sample, ...]

    def columns(self) -> dict[str, list[str | int | float]]:
        """Return the columns by heading; each has one value for each sample."""
        rows: list[dict[str, str | int | float]] = [
            {"batch": self.batch, "policy_version": self.policy_version, **vars(sample)} for sample in self.samples
        ]
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def rows(self) -> list[list[str | int | float]]:
        """Return one row for each sample, in the order of ``columns``."""
        return [list(row) for row in zip(*self.columns().values(), strict=True)]

    def markdown(self) -> str:
        """Return a table whose cells cannot break out of it."""
        columns = self.columns()
        lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        for row in self.rows():
            lines.append("| " + " | ".join(one_line(cell, MOST_CHARACTERS).replace("|", "\\|") for cell in row) + " |")
        return "\n".join(lines)


class SampleReader:
    """Reads samples while the run is active. A ledger that cannot be read costs only the samples."""

    def __init__(self, directory: Path, model: Path) -> None:
        """``directory``: the run's; ``model``: where tokenizer.json is."""
        self._directory = directory
        self._model = model
        self._tokenizer: Tokenizer | None = None
        self.problem = ""
        """Why there were no samples; empty while there are."""

    def evaluation(self, batch: int, most: int) -> SampleTable | None:
        """Return up to ``most`` finished episodes of the evaluation after ``batch`` batches; None if they cannot be read."""
        try:
            with reading(self._directory) as connection:
                reader = Reader(self._directory / LEDGER_FILE, connection)
                found = reader.rows(EvaluationRow, "WHERE batch = ? AND status = 'done'", (batch,))
                if not found:
                    return None
                of_evaluation = "WHERE split = 'eval' AND evaluation = ? ORDER BY task_index LIMIT ?"
                groups = reader.rows(GroupRow, of_evaluation, (found[0].evaluation_id, most))
                samples = [sample for group in groups for sample in self._samples(reader, group)]
        # A ledger, an archive file or a tokenizer may raise; tokenizers raises plain Exceptions.
        except (NoLedger, StoreCorrupt, sqlite3.Error, OSError, ValueError) as error:
            self.problem = str(error)
            return None
        except Exception as error:  # noqa: BLE001
            self.problem = f"{self._model}: {error}"
            return None
        return SampleTable(batch=batch, policy_version=found[0].policy_version, samples=tuple(samples))

    def _samples(self, reader: Reader, group: GroupRow) -> list[Sample]:
        members = reader.members([group.group_id])
        return [self._sample(group, row, payload) for row, payload in members if row.status == "finished"]

    def _sample(self, group: GroupRow, row: TrajectoryRow, payload: Payload) -> Sample:
        ids = payload.token_ids.tolist()
        length = next(
            (sum(each.num_tokens for each in payload.segments[:index])
             for index, segment in enumerate(payload.segments) if segment.kind == "action"),
            len(ids),
        )  # fmt: skip
        return Sample(
            task=group.task_index,
            prompt=self._text(ids[:length]),
            answer=self._text(ids[length:]),
            reward=row.reward,
            num_tokens=row.num_action_tokens,
            ended=row.finish_reason or "",
        )

    def _text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"
