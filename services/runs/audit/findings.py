"""The counts and the violations that an audit finds."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

KEPT: Final = 20
"""Texts that are kept for each kind of violation; all violations are counted."""


@dataclass
class Findings:
    """Violations by name: their number, and the first texts. Bounded, however broken the ledger is."""

    counts: Counter[str] = field(default_factory=Counter)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        self.counts[name] += 1
        kept = self.texts.setdefault(name, [])
        if len(kept) < KEPT:
            kept.append(text)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the run's settings say about its batches; None when there is no settings.json."""

    group_size: int | None = None
    groups_per_batch: int | None = None
    max_lag: int | None = None
    grades_groups: bool | None = None
    """Whether groups of training are complete only when their answers were compared (reward.group)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The number of training or held-out groups that ended in one way."""

    split: str
    status: str
    reason: str
    groups: int
    trajectories: int
    tokens: int
    action_tokens: int
    adapter: str = ""
    """Of several that the run trains."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result. ``notes`` are not violations: they name what could not be checked, or is still under way."""

    directory: Path
    run_id: str
    outcomes: list[Outcome]
    num_batches: int
    num_trained_batches: int
    num_trained_again: int
    """How often a batch was trained again after a restart of the learner."""
    num_quarantined: int
    """Batches that were quarantined, and are skipped."""
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
        found = Counter[str]()
        for outcome in self.outcomes:
            if outcome.status == "dropped":
                found[outcome.reason] += outcome.groups
        return dict(found)

    @property
    def filtered(self) -> int:
        """Zero-advantage groups that dynamic sampling filtered out."""
        return sum(outcome.groups for outcome in self.outcomes if outcome.status == "filtered")

    @property
    def problems(self) -> list[str]:
        """The violations whose texts are kept."""
        return [text for texts in self.findings.texts.values() for text in texts]

    def as_plain(self) -> dict[str, Any]:
        """Return the audit as plain JSON values."""
        return {
            "directory": str(self.directory),
            "run_id": self.run_id,
            "clean": self.clean,
            "outcomes": [vars(outcome) for outcome in self.outcomes],
            "batches": self.num_batches,
            "batches_trained": self.num_trained_batches,
            "batches_trained_again": self.num_trained_again,
            "batches_quarantined": self.num_quarantined,
            "trajectories_resumed": self.num_resumed,
            "versions": self.num_versions,
            "chunks": self.num_chunks,
            "violations": {
                name: {"count": count, "first": self.findings.texts[name]} for name, count in self.findings.counts.items()
            },
            "notes": self.notes,
        }
