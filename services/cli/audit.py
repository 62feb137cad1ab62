"""``gspo audit RUN_DIR``: prove that every trajectory was trained exactly once or dropped for a stated reason."""

import json
from pathlib import Path
from typing import Final

from rich.table import Table

from gspo_services.runs.audit import Audit, audit_run
from gspo_services.shared.runtime.console import PlainConsole

EXIT_VIOLATIONS: Final = 1
SHOWN_NOTES: Final = 5
SPLITS: Final = {"train": "training", "eval": "held out"}


def audit_command(directory: Path, *, as_json: bool) -> int:
    """Audit and print. Returns 0 for a clean run, 1 for one with violations. Raises: NoLedger."""
    audit = audit_run(directory)
    if as_json:
        print(json.dumps(audit.as_plain(), indent=2))
    else:
        print_audit(audit, PlainConsole())
    return 0 if audit.clean else EXIT_VIOLATIONS


def print_audit(audit: Audit, console: PlainConsole) -> None:
    """Print the outcomes, and what is wrong."""
    table = Table(title=f"Audit of {audit.directory}")
    for heading in ("outcome", "groups", "trajectories", "tokens", "action tokens"):
        table.add_column(heading, justify="left" if heading == "outcome" else "right")
    for outcome in audit.outcomes:
        reason = f": {outcome.reason}" if outcome.reason else ""
        reason += f", adapter {outcome.adapter}" if outcome.adapter else ""
        table.add_row(
            f"{SPLITS.get(outcome.split, outcome.split)}, {outcome.status}{reason}",
            f"{outcome.groups:,}",
            f"{outcome.trajectories:,}",
            f"{outcome.tokens:,}",
            f"{outcome.action_tokens:,}",
        )
    console.print(table)
    quarantined = f", {audit.num_quarantined} quarantined" if audit.num_quarantined else ""
    again = f", {audit.num_trained_again} of them once more after a restart" if audit.num_trained_again else ""
    console.print(
        f"batches: {audit.num_batches:,} assembled, {audit.num_trained_batches:,} trained{again}{quarantined}; "
        f"policy versions: {audit.num_versions:,}",
        soft_wrap=True,
    )
    console.print(
        f"chunks: {audit.num_chunks:,}; trajectories continued under another lease: {audit.num_resumed:,}",
        soft_wrap=True,
    )
    for note in audit.notes[:SHOWN_NOTES]:
        console.print(f"note: {note}", soft_wrap=True)
    if len(audit.notes) > SHOWN_NOTES:
        console.print(f"... and {len(audit.notes) - SHOWN_NOTES} more notes")
    if audit.clean:
        console.print("clean", style="bold green")
        return
    for name, count in audit.findings.counts.items():
        texts = audit.findings.texts[name]
        console.print(f"{name}: {count}", style="bold red")
        for text in texts:
            console.print(f"    {text}", soft_wrap=True)
        if count > len(texts):
            console.print(f"    ... and {count - len(texts)} more")
