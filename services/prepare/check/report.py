"""Shows findings: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gspo_services.prepare.check.findings import SEVERITY, Finding, Status, worst
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.plain_text import one_line

STYLES: Final[dict[Status, str]] = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}
COUNTED: Final[dict[Status, tuple[str, str]]] = {
    "ok": ("ok", "ok"), "note": ("note", "notes"), "warn": ("warning", "warnings"), "fail": ("failure", "failures"),
}  # fmt: skip


ASKED_FOR: Final = ("architecture", "memory", "learner memory", "engine memory", "time")
"""What people look for, shown also when it is ok."""


def show(findings: Sequence[Finding], title: str, console: PlainConsole, *, verbose: bool) -> None:
    """Print a table and what it comes to: a row for each finding, or, unless ``verbose``, one for all that is ok."""
    if verbose:
        _table(findings, title, console)
        console.print(summary(findings))
        return
    well = [finding for finding in findings if finding.status == "ok" and finding.check not in ASKED_FOR]
    _table([finding for finding in findings if finding not in well], title, console)
    if well:
        console.print(Text(f"also ok: {', '.join(one_line(finding.check) for finding in well)}"))
    console.print(f"{summary(findings)}; --verbose shows each")


def _table(findings: Sequence[Finding], title: str, console: PlainConsole) -> None:
    table = Table(title=one_line(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name, least in (("", 4), ("check", 8), ("how", 4)):
        table.add_column(name, min_width=least, no_wrap=not name)
    table.add_column("found", overflow="fold", ratio=1)
    for finding in findings:
        table.add_row(
            Text(finding.status, style=STYLES[finding.status]),
            finding.check,
            Text(finding.basis, style="dim"),
            _found(finding),
        )
    console.print(table)


def _found(finding: Finding) -> Text:
    lines = [one_line(line) for line in finding.text.splitlines() or [""]]
    text = Text("\n".join(lines))
    if finding.way_out:
        text.append(f"\n-> {one_line(finding.way_out)}", style="bold")
    return text


def summary(findings: Sequence[Finding]) -> str:
    """How many findings have which status, and what that means."""
    numbers = Counter(finding.status for finding in findings)
    counted = ", ".join(
        f"{numbers[status]} {COUNTED[status][numbers[status] != 1]}" for status in SEVERITY if numbers[status]
    )
    verdict = {"fail": "it cannot work as it is", "warn": "it can run; read the warnings"}
    return f"{counted}: {verdict.get(worst(findings), 'it can work')}"


def as_json(findings: Sequence[Finding], config: str, hardware: str) -> str:
    """The findings as one JSON object, in ASCII: no character of it acts on a terminal."""
    plain = {
        "config": config,
        "hardware": hardware,
        "status": worst(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(plain, indent=2)
