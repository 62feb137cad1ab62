"""``gspo doctor RUN``: show what a run waits for, what is wrong, and what to do."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from gspo_services.cli.doctor.diagnosis import diagnose, unseen
from gspo_services.cli.doctor.observe import Observation, observe, process_names
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import Settings, load_settings, override_settings, read_run_settings

EXIT_WRONG: Final = 1
CELL_CHARACTERS: Final = 200
CLOCK_ERROR_S: Final = 2.0
"""The clocks of two machines may differ by so much without a word."""
HEADINGS: Final = ("process", "state", "waits for", "last event", "version", "lag", "work")


def doctor_command(run: Path, overrides: Sequence[str]) -> int:
    """Observe the run and print the findings. Returns 0 when nothing is wrong, otherwise 1.

    Raises: ConfigurationError when there is no such run.
    """
    configure_logging("doctor", usual_level="warning")
    settings = _settings(run, overrides)
    seen = asyncio.run(observe(settings, datetime.now(tz=UTC)))
    return report(seen, PlainConsole())


def report(seen: Observation, console: PlainConsole) -> int:
    """Print the observations and what they mean. Returns the exit status."""
    console.print(processes_table(seen))
    remarks = diagnose(seen)
    for remark in remarks:
        mark, style = ("wrong:", "bold red") if remark.wrong else ("note:", "")
        console.print(mark, style=style, end=" ")
        console.print(remark.text, soft_wrap=True)
    not_seen = unseen(seen)
    for what in not_seen:
        console.print(f"not checked: {what}", soft_wrap=True)
    if any(remark.wrong for remark in remarks):
        return EXIT_WRONG
    if not_seen:
        console.print("nothing is wrong in what could be checked", style="bold yellow")
    else:
        console.print("nothing is wrong", style="bold green")
    return 0


def _settings(run: Path, overrides: Sequence[str]) -> Settings:
    """Read the settings from a run's directory, which may have been moved, or from a configuration file."""
    if run.is_dir():
        return override_settings(read_run_settings(run), [f"run.directory={run}", *overrides])
    return load_settings(run, overrides)


def processes_table(seen: Observation) -> Table:
    """Tabulate the processes, one row each; a dash means unknown."""
    table = Table(title=f"Run {seen.settings.run.directory}")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    rollouts = {} if seen.status is None else {rollout["peer"]: rollout for rollout in seen.status["rollouts"]}
    for name in process_names(seen.settings, seen.status):
        row = (name, *_row(seen, name, rollouts.get(name)))
        table.add_row(*(one_line(cell, CELL_CHARACTERS) for cell in row))
    return table


def _row(seen: Observation, name: str, rollout: dict[str, Any] | None) -> tuple[str, str, str, str, str, str]:
    page, log, status = seen.pages.get(name), seen.logs.get(name), seen.status
    metrics = {} if page is None else page.metrics
    event = "-" if log is None else f"{log.event}, {ago(log.age_s)}"
    state, waits = _state(seen, name, rollout)
    if name == "broker":
        if status is None:
            version = "-" if seen.ledger is None else str(seen.ledger.version)
            return state, waits, event, version, "-", "-"
        groups = status["groups"]
        queued = _number(metrics, "gspo_broker_queue_messages")
        work = f"{groups['open']} groups open, {groups['complete']} ready; {queued} messages queued"
        lag = "-" if status["lag_mean"] is None else f"{status['lag_mean']:.2f} mean, {status['lag_max']} largest"
        return state, waits, event, str(status["policy_version"]), lag, work
    if name == "learner":
        work = f"next batch {_number(metrics, 'gspo_learner_next_batch')}" if metrics else "-"
        return state, waits, event, _number(metrics, "gspo_learner_policy_version"), "-", work
    version = _number(metrics, "gspo_rollout_policy_version")
    lag = "-"
    work = f"{_number(metrics, 'gspo_rollout_unacknowledged_messages')} unacknowledged" if metrics else ""
    if rollout is not None and status is not None:
        version, lag = str(rollout["policy_version"]), str(status["policy_version"] - rollout["policy_version"])
        work = ", ".join(filter(None, (f"{rollout['leases']} episodes", work)))
    return state, waits, event, version, lag, work or "-"


def _state(seen: Observation, name: str, rollout: dict[str, Any] | None) -> tuple[str, str]:
    """Return the process's state, and what it waits for."""
    page, status = seen.pages.get(name), seen.status
    own = status if name in ("broker", "learner") else None
    answers = rollout is not None or (own is not None and (name != "learner" or bool(own["learner"])))
    if page is None:
        state = "connected" if answers else "unknown"
    elif page.up:
        state = "ready" if page.ready else "not ready"
    else:
        state = "connected" if answers else "down"
    if rollout is not None:
        state = f"{state}, {rollout['status']}"
    waits = "-" if page is None or not page.up or page.ready else page.text
    if own is not None and waits == "-":
        waits = own["waiting_for"] or "-"
    return state, waits


def _number(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.0f}" if name in metrics else "-"


def ago(seconds: float) -> str:
    """Say how old something is, by the clock here."""
    return f"{age(max(0.0, seconds))} ago" if seconds > -CLOCK_ERROR_S else f"by a clock {age(-seconds)} ahead"


def age(seconds: float) -> str:
    """Format a duration in the unit that people would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
