"""What all checks look at: the configuration, and where it will run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_services.prepare.check.findings import Finding
from gspo_services.shared.estimates import Hardware, ModelShape
from gspo_services.shared.settings import Settings, is_private


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A configuration and the place of its run."""

    settings: Settings
    """As configured; ``model_path`` may be another directory."""
    sources: Mapping[str, str]
    """Of each value that is not the default, by section.key."""
    model_path: Path
    """Where config.json and the tokenizer are looked for."""
    hardware: Hardware
    elsewhere: bool
    """The run will be on other machines: what is missing here is no fault."""
    num_rollouts: int
    """Rollouts that the run will have."""

    @property
    def num_ranks(self) -> int:
        """Of the learner, on all machines."""
        return self.settings.learner.num_ranks * self.settings.learner.num_nodes

    @property
    def has_unknown_hardware(self) -> bool:
        """The run will be on machines that nobody named."""
        return self.elsewhere and not self.hardware.is_named

    def is_set(self, key: str) -> bool:
        """Whether somebody has given this key a value."""
        return key in self.sources

    def missing(self, check: str, text: str, way_out: str) -> Finding:
        """Something is not on this machine: a fault where the run will be here."""
        if self.elsewhere:
            return Finding(
                check=check, status="note", text=f"{text} Not looked into: the run will be on other machines", way_out=""
            )
        return Finding(check=check, status="fail", text=text, way_out=f"{way_out}; or --elsewhere, if it will run elsewhere")


def is_for_several_hosts(settings: Settings) -> bool:
    """Whether processes of this run reach each other over a network, so that this machine need not be one of theirs."""
    endpoints = (settings.broker.work_endpoint, settings.broker.batch_endpoint)
    return not all(is_private(endpoint) for endpoint in endpoints)


@dataclass(frozen=True, kw_only=True)
class ReadModel:
    """What is known of the model."""

    config: Mapping[str, Any]
    """config.json; empty when there is none."""
    shape: ModelShape | None
    teacher: ModelShape | None = None
    """That of distillation.teacher."""

    @property
    def teacher_parameters(self) -> int:
        return 0 if self.teacher is None else self.teacher.parameters
