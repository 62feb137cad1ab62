"""``gspo data add RUN_DIR FILE``: more training tasks for a run, also while it goes on."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import structlog

from services.broker.refresh import INCOMING, REFUSED, read_additions
from services.broker.rows import AdditionRow
from services.broker.store import LEDGER_FILE, Reader, file_digest, reading
from services.environments import MixedTasks, create_environment, create_task_set
from services.runtime.settings import read_run_settings

LOOK_S: Final = 0.2
WAIT_S: Final = 15.0
EXIT_REFUSED: Final = 1
DESCRIPTION: Final = """\
Add the tasks of FILE (.jsonl or .parquet) to the training set of a run, also while it goes on. Its rows are read as those
of the run's own files. All of them are checked first: none is added if one is bad, or is there already. Prompts from then on
are drawn from the larger set. The file is copied into the run's directory, and the ledger names it with its digest.

  gspo data add runs/sums more.jsonl
  gspo data add runs/sums hard.jsonl --source olympiad     to one of several sources

A broker that does not run adds the tasks when it starts. Status 0: added, or waiting for the broker; 1: refused.
"""


def data_command(words: Sequence[str]) -> int:
    """Parse and add. Returns the exit status. Raises: ValueError, OSError, ConfigurationError with texts for people."""
    arguments = _parser().parse_args(words)
    directory, file = arguments.directory, arguments.file
    tasks, additions = _tasks_of(directory)
    names = [part.name for part in tasks.parts]
    source = arguments.source or names[0]
    if source not in names:
        raise ValueError(f'--source is "{source[:100]}": the run has {", ".join(names)}')
    digest = file_digest(file)
    known = next((row for row in additions if row.digest == digest), None)
    if known is not None:
        print(f"{file}: its {known.num_tasks} tasks were added before, as addition {known.number}")
        return 0
    number = tasks.add(file)
    incoming = _hand_in(directory, file, "" if source == names[0] else source)
    print(f"{file}: {number} tasks for source {source}, on their way", flush=True)
    return _wait(directory, incoming, digest, arguments.wait)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo data", description="A run's training tasks.", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser(
        "add", help="more tasks for a run", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run's directory")
    add.add_argument("file", type=Path, metavar="FILE", help="rows as in the run's own files, .jsonl or .parquet")
    add.add_argument("--source", metavar="NAME", help="the source that the tasks are for (default: the first one)")
    add.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="S", help="seconds to wait for the broker (default: %(default)g)"
    )
    return parser


def _tasks_of(directory: Path) -> tuple[MixedTasks, list[AdditionRow]]:
    """The run's training tasks as they are now, and what was added. Raises: ValueError, ConfigurationError."""
    settings = read_run_settings(directory)
    create = create_task_set if settings.agent.is_used else create_environment
    # What is loaded is of interest in the broker's log alone.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    tasks = create(settings.environment.name, settings.environment.options).tasks("train")
    if not isinstance(tasks, MixedTasks):
        name = settings.environment.name
        raise ValueError(f'the environment "{name}" reads no files: tasks can be added to dataset and rows')
    with reading(directory) as connection, closing(connection):
        additions = Reader(directory / LEDGER_FILE, connection).rows(AdditionRow, "ORDER BY number")
    read_additions(directory, tasks, additions)
    return tasks, additions


def _hand_in(directory: Path, file: Path, source: str) -> Path:
    """Put a copy where the broker looks; it is there as a whole, or not at all."""
    folder = directory / INCOMING / source
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{os.getpid()}-{file.name}"
    shutil.copyfile(file, partial)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    path = folder / file.name
    partial.rename(path)
    return path


def _wait(directory: Path, incoming: Path, digest: str, wait_s: float) -> int:
    """Until the ledger has it, or it is refused."""
    end = time.monotonic() + wait_s
    refused = directory / REFUSED / f"{incoming.name}.reason.txt"
    while time.monotonic() < end:
        with reading(directory) as connection, closing(connection):
            rows = Reader(directory / LEDGER_FILE, connection).rows(AdditionRow, "WHERE digest = ?", (digest,))
        if rows:
            print(f"addition {rows[0].number}: {rows[0].num_tasks} tasks are in the ledger")
            return 0
        if not incoming.exists() and refused.exists():
            print(f"gspo data: refused: {refused.read_text(encoding='utf-8').strip()}", file=sys.stderr)
            return EXIT_REFUSED
        time.sleep(LOOK_S)
    print("the broker has not taken it yet: it does when it runs")
    return 0
