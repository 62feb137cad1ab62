"""``gspo backup`` and ``gspo restore``: copies of a run."""

from pathlib import Path
from typing import Final

from rich.table import Table

from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup import back_up, list_backups, restore
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.errors import EXIT_FAILED, ConfigurationError, ServiceError

MIB: Final = 2**20


def backup_command(directory: Path, destination: Path | None) -> int:
    """Make a backup. Returns 0, or 1 when it cannot be made. Raises: ConfigurationError, NoLedger, OSError."""
    if destination is None:
        raise ConfigurationError("also name the directory for the backups: gspo backup RUN_DIR DEST")
    console = PlainConsole()
    try:
        path, manifest = back_up(directory, destination, lambda line: _say(console, line))
    except ServiceError as error:
        _say(console, f"gspo backup: {error}")
        return EXIT_FAILED
    positions = ", ".join(str(position) for position in manifest.positions) or "none"
    _say(
        console,
        f"{path}: {manifest.num_bytes / MIB:,.1f} MiB, {manifest.new_bytes / MIB:,.1f} of them new; {manifest.num_batches} "
        f"batches, checkpoints after {positions}",
    )
    return 0


def list_command(destination: Path) -> int:
    """List the complete backups, oldest first. Returns 0."""
    table = Table(title=f"Backups in {destination}")
    for heading in ("backup", "run", "batches", "--batch can be", "MiB", "new MiB"):
        table.add_column(heading, overflow="fold")
    for path, manifest in list_backups(destination):
        table.add_row(
            path.name,
            manifest.run_id,
            f"{manifest.num_batches:,}",
            ", ".join(str(position) for position in manifest.positions) or "none",
            f"{manifest.num_bytes / MIB:,.1f}",
            f"{manifest.new_bytes / MIB:,.1f}",
        )
    PlainConsole().print(table)
    return 0


def restore_command(source: Path, directory: Path, batch: int | None, learner: Path | None) -> int:
    """Restore, and audit the result. Returns 0, or 1 when a file does not match its digest or the audit fails.

    Raises: ConfigurationError, OSError.
    """
    console = PlainConsole()
    try:
        restore(source, directory, batch, lambda line: _say(console, line), learner)
        audit = audit_run(directory)
    except ConfigurationError:
        raise
    except ServiceError as error:
        _say(console, f"gspo restore: {error}")
        return EXIT_FAILED
    if not audit.clean:
        _say(console, f"{directory} is restored, and its audit finds: {'; '.join(audit.problems)}")
        return EXIT_FAILED
    _say(
        console,
        f"{directory} is restored: {audit.num_batches} batches, {audit.num_trained_trajectories} trajectories trained; its "
        "audit is clean. The run continues with the command that started it, with this run.directory",
    )
    return 0


def _say(console: PlainConsole, line: str) -> None:
    console.print(line, soft_wrap=True)
