"""What an audit counts and what it objects to."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

KEPT: Final = 20
"""So many of each kind are kept in words; all are counted."""


@dataclass
class Findings:
    """Violations by name: how many, and the first ones in words. Bounded, however broken the ledger is."""

    counts: Counter[str] = field(default_factory=Counter)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        self.counts[name] += 1
        kept = self.texts.setdefault(name, [])
        if len(kept) < KEPT:
            kept.append(text)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the run's settings say about its batches; None where there is no settings.json."""

    group_size: int | None = None
    groups_per_batch: int | None = None
    max_lag: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of training or held-out groups of one kind."""

    split: str
    status: str
    reason: str
    groups: int
    trajectories: int
    tokens: int
    action_tokens: int


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result. ``notes`` are no violations: what could not be checked, and what is still on its way."""

    directory: Path
    run_id: str
    outcomes: list[Outcome]
    num_batches: int
    num_trained_batches: int
    num_trained_again: int
    """Times that a batch was trained once more, after a restart of the learner."""
    num_resumed: int
    """Trajectories whose tokens came under more than one lease."""
    num_versions: int
    num_chunks: int
    findings: Findings
    notes: list[str]

    @property
    def clean(self) -> bool:
        return not self.findings.counts

    @property
    def num_trained_trajectories(self) -> int:
        return sum(outcome.trajectories for outcome in self.outcomes if outcome.status == "trained")

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped groups by reason."""
        return {outcome.reason: outcome.groups for outcome in self.outcomes if outcome.status == "dropped"}

    @property
    def problems(self) -> list[str]:
        """The violations in words, as far as they are kept."""
        return [text for texts in self.findings.texts.values() for text in texts]

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "directory": str(self.directory),
            "run_id": self.run_id,
            "clean": self.clean,
            "outcomes": [vars(outcome) for outcome in self.outcomes],
            "batches": self.num_batches,
            "batches_trained": self.num_trained_batches,
            "batches_trained_again": self.num_trained_again,
            "trajectories_resumed": self.num_resumed,
            "versions": self.num_versions,
            "chunks": self.num_chunks,
            "violations": {
                name: {"count": count, "first": self.findings.texts[name]} for name, count in self.findings.counts.items()
            },
            "notes": self.notes,
        }
