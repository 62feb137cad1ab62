"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from gspo_services.shared.estimates import Span

Status = Literal["ok", "note", "warn", "fail"]
Basis = Literal["read", "tried", "estimated"]
"""read: in the settings, in files, from the system. tried: it was done here. estimated: a formula with assumptions."""
SEVERITY: Final[tuple[Status, ...]] = ("ok", "note", "warn", "fail")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table."""

    check: str
    """What was looked at, in one to three words."""
    status: Status
    text: str
    way_out: str = ""
    """What to do about it; never empty for warn and fail."""
    basis: Basis = "read"

    def __post_init__(self) -> None:
        assert self.way_out or self.status in ("ok", "note"), f"{self.check}: {self.text}: no way out"


def worst(findings: Iterable[Finding]) -> Status:
    """The most serious status; ok for none."""
    return max((finding.status for finding in findings), key=SEVERITY.index, default="ok")


def verdict(check: str, text: str, needed: Span, room: float, way_out: str) -> Finding:
    """A verdict that allows for the width of the estimate."""
    if needed.low > room:
        return Finding(check=check, status="fail", text=text, way_out=way_out, basis="estimated")
    if needed.high > room:
        return Finding(check=check, status="warn", text=f"{text}: perhaps too little", way_out=way_out, basis="estimated")
    return Finding(check=check, status="ok", text=text, basis="estimated")
