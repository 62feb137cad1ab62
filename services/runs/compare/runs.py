"""Reads runs for a comparison, and groups those that differ only in their seed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_services.broker.store import LEDGER_FILE, lock_holder
from gspo_services.runs.metrics import RunMetrics, read_metrics
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import read_run_settings, training_settings

_LENGTH = ("run", "num_batches")
_SEED = ("run", "seed")
_RETENTION = (("learner", "keep_checkpoints"), ("learner", "keep_best_checkpoint"))
_NOT_IN_KIND = (_SEED, _LENGTH, *_RETENTION)
"""Runs of one kind may differ in these: how long they run and what they keep changes no batch."""

Value = dict[tuple[str, str], Any]


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run. It may be unfinished or active."""

    directory: Path
    metrics: RunMetrics
    settings: Value
    """Every setting that is not a path or address, by section and key, with defaults; empty if unknown."""
    num_batches: int | None
    """How many batches it is to train; None: unknown."""
    is_live: bool
    """Whether a broker on this machine has its ledger open."""
    notes: tuple[str, ...]
    """What the user should know: damaged lines, unknown settings."""

    @property
    def num_trained(self) -> int:
        return len(self.metrics.batches)

    @property
    def seed(self) -> int | None:
        value = self.settings.get(_SEED)
        return value if isinstance(value, int) else None

    @property
    def state(self) -> str:
        """live, finished or unfinished."""
        if self.is_live:
            return "live"
        return "finished" if self.num_batches is not None and self.num_trained >= self.num_batches else "unfinished"


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Runs that differ only in their seed; often just one."""

    name: str
    """A, B, C and so on."""
    runs: tuple[ComparedRun, ...]


def open_compared(directory: Path) -> ComparedRun:
    """Read what exists of a run. Raises: ConfigurationError when it has no metrics.jsonl."""
    metrics = read_metrics(directory)
    notes = [str(each) for each in metrics.damage]
    if not metrics.batches and not metrics.evaluations:
        notes.append(f"{metrics.path}: no batch and no evaluation yet")
    plain: dict[str, Any] = {}
    try:
        plain = read_run_settings(directory).model_dump(mode="json")
    except ConfigurationError as error:
        notes.append(f"settings are not compared: {str(error).splitlines()[0]}")
    settings = {(section, key): value for section, key, value in training_settings(plain)}
    num_batches = settings.get(_LENGTH)
    return ComparedRun(
        directory=directory,
        metrics=metrics,
        settings=settings,
        num_batches=num_batches if isinstance(num_batches, int) else None,
        is_live=lock_holder(directory / LEDGER_FILE) is not None,
        notes=tuple(notes),
    )


def by_seed(runs: Sequence[ComparedRun]) -> list[SeedGroup]:
    """Group runs of one kind, in their order. Runs with unknown settings, or with a repeated seed, form separate groups:
    they say nothing about the spread over seeds."""
    kinds: dict[str, list[ComparedRun]] = {}
    for place, run in enumerate(runs):
        kind = _kind(run) if run.settings else f"unknown {place}"
        while any(other.seed == run.seed for other in kinds.get(kind, ())):
            kind += " again"
        kinds.setdefault(kind, []).append(run)
    return [SeedGroup(name=_letters(place), runs=tuple(members)) for place, members in enumerate(kinds.values())]


def differing(groups: Sequence[SeedGroup]) -> dict[tuple[str, str], list[str]]:
    """Return the settings that differ between groups, by section and key: each group's value as JSON, or a dash if it
    is unknown."""
    known = [group for group in groups if group.runs[0].settings]
    keys = dict.fromkeys(key for group in known for key in group.runs[0].settings)
    found = {}
    for key in keys:
        values = [_values(group, key) for group in groups]
        if len({value for value, group in zip(values, groups, strict=True) if group in known}) > 1:
            found[key] = values
    found.pop(_SEED, None)
    return found


def _values(group: SeedGroup, key: tuple[str, str]) -> str:
    found = dict.fromkeys(
        json.dumps(run.settings[key], sort_keys=True) if key in run.settings else "-" for run in group.runs
    )
    return ", ".join(found)


def _kind(run: ComparedRun) -> str:
    return json.dumps([[*key, value] for key, value in run.settings.items() if key not in _NOT_IN_KIND], sort_keys=True)


def _letters(place: int) -> str:
    """Return A to Z, then AA, AB and so on."""
    return chr(ord("A") + place) if place < 26 else _letters(place // 26 - 1) + _letters(place % 26)
