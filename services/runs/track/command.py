"""``gspo track RUN --to NAME``: send a run to an experiment tracker, also while it is active."""

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import structlog

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import LEDGER_FILE, NoLedger, Reader, StoreCorrupt, reading
from gspo_services.runs.track.clients import CLIENTS, Tracker, TrackerRun, find_client
from gspo_services.runs.track.cursor import Cursor, CursorFile, new_tracker_run
from gspo_services.runs.track.provenance import code_version, flat_settings
from gspo_services.runs.track.samples import SampleReader
from gspo_services.runs.track.session import Samples, TrackerSession
from gspo_services.shared.runtime.config_arguments import add_override_argument
from gspo_services.shared.runtime.errors import EXIT_FAILED, ConfigurationError, exit_status
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.settings import Settings, load_settings, override_settings, read_run_settings

log = structlog.get_logger()

NICENESS: Final = 10
END_S: Final = 60.0
"""Seconds that the tracker gets after a signal."""
POLL_S: Final = 1.0
DESCRIPTION: Final = """\
Send a run to an experiment tracker: its curves, its settings, the version of the code, and some answers of each evaluation.
The command reads metrics.jsonl and the ledger, and writes only its own notes in RUN/trackers. Nothing is sent twice.

  gspo track runs/arithmetic --to tensorboard             send what exists; then: tensorboard --logdir runs/arithmetic
  gspo track runs/arithmetic --to wandb --follow          and what follows, until Ctrl-C
  gspo track runs/arithmetic                              to each of trackers.to

`gspo run` does this by itself for the names in trackers.to. The trackers' clients are not installed with gspo:
pip install tensorboard, wandb, mlflow or trackio. Their own variables choose where the data goes: WANDB_MODE, WANDB_ENTITY,
MLFLOW_TRACKING_URI, TRACKIO_SERVER_URL and so on.

Status 0: all was sent; 1: the tracker refuses; 2: no such run, or the tracker is not installed; 4: another process sends it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and send. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    configure_logging("tracker")
    return exit_status(lambda: _track(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo track", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's directory, or its TOML file")
    parser.add_argument(
        "--to", action="append", choices=[*CLIENTS], default=[], help="a tracker; can be repeated (default: trackers.to)"
    )
    parser.add_argument("--follow", action="store_true", help="continue while the run is active; for one tracker")
    add_override_argument(parser, "override one setting, such as --set trackers.project=NAME; can be repeated")
    return parser


def _track(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments.run, arguments.overrides)
    names = list(dict.fromkeys(arguments.to)) or list(settings.trackers.to)
    if not names:
        raise ConfigurationError("no tracker is named: use --to, such as --to tensorboard, or set trackers.to")
    if arguments.follow and len(names) > 1:
        raise ConfigurationError(f"--follow is for one tracker, not for {', '.join(names)}: start one process for each")
    directory = settings.run.directory
    if not arguments.follow and not (directory / METRICS_FILE).is_file():
        raise ConfigurationError(f"{directory / METRICS_FILE}: no such file; give the run.directory of a run that has begun")
    for name in names:
        find_client(name)
    if arguments.follow:
        os.nice(NICENESS)  # On a shared machine training comes first.
    stop = _stop_on_signals()
    return max(_send(settings, name, stop, follow=arguments.follow) for name in names)


def _settings(run: Path, overrides: Sequence[str]) -> Settings:
    if run.is_dir():
        return override_settings(read_run_settings(run), [f"run.directory={run}", *overrides])
    return load_settings(run, overrides)


def _send(settings: Settings, name: str, stop: threading.Event, *, follow: bool) -> int:
    directory = settings.run.directory
    if follow:
        _wait_for_run(directory, stop)
    file = CursorFile(directory, name)
    with file.locked():
        cursor = first_cursor(file, settings.trackers.run_name or directory.resolve().name, run_id_of(directory))
        run = TrackerRun(
            name=cursor.tracker_run,
            project=settings.trackers.project,
            directory=directory,
            settings=flat_settings(settings),
            code=code_version(Path.cwd()),
            begins=not cursor.line,
        )
        samples = Samples(reader=SampleReader(directory, settings.model.path), most=settings.trackers.samples)
        session = TrackerSession(directory, file, cursor, partial(_open, name, run), samples)
        if follow:
            session.follow(stop)
        else:
            session.send()
        log.info("sent", tracker=name, run=run.name, project=run.project, line=session.cursor.line)
        return EXIT_FAILED if session.cursor.error else 0


def _open(name: str, run: TrackerRun) -> Tracker:
    return find_client(name).open(run)


def first_cursor(file: CursorFile, run_name: str, run_id: str) -> Cursor:
    """Return where to continue: at a new run of the tracker, if nothing was sent yet, or what was sent is of another run.

    What was sent under a damaged cursor stays, and everything is sent again to the new one: no step is doubled.
    """
    try:
        found = file.read()
    except ValueError as error:
        log.warning("cursor_damaged", error=str(error), put_away=str(file.put_away()), way_on="a new run of the tracker")
        found = None
    if found is not None and found.run_id and run_id and found.run_id != run_id:
        log.warning("other_run", sent=found.run_id, here=run_id, way_on="a new run of the tracker")
        found = None
    if found is not None:
        return found if found.run_id else Cursor(tracker_run=found.tracker_run, run_id=run_id, line=found.line)
    begun = Cursor(tracker_run=new_tracker_run(run_name), run_id=run_id)
    file.write(begun)
    return begun


def run_id_of(directory: Path) -> str:
    """Return the run's id; empty while it has no readable ledger."""
    with suppress(NoLedger, StoreCorrupt, OSError):
        with reading(directory) as connection:
            return Reader(directory / LEDGER_FILE, connection).meta_value("run_id")
    return ""


def _wait_for_run(directory: Path, stop: threading.Event) -> None:
    """Return once the run's identity is known: the broker has made its ledger."""
    metrics = directory / METRICS_FILE
    while not run_id_of(directory) and not (metrics.is_file() and metrics.stat().st_size):
        if stop.wait(POLL_S):
            return


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def request(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)  # Asked twice: a tracker that hangs must not hold its operator.
        stop.set()
        # A client that hangs must not outlive a killed supervisor, and hold the run's cursor for ever.
        end = threading.Timer(END_S, os._exit, (EXIT_FAILED,))
        end.daemon = True
        end.start()

    signal.signal(signal.SIGTERM, request)
    signal.signal(signal.SIGINT, request)
    return stop


if __name__ == "__main__":
    raise SystemExit(main())
