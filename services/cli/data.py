"""``gspo data add RUN_DIR FILE``: add training tasks to a run, also while it is running."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from gspo.files import flush_file, partial_path
from gspo_services.broker.refresh import INCOMING, REFUSED, read_additions
from gspo_services.broker.rows import AdditionRow
from gspo_services.broker.store import LEDGER_FILE, Reader, file_digest, reading
from gspo_services.shared.runtime.logs import quiet_logs
from gspo_services.shared.runtime.operations import only_operation, operation_on
from gspo_services.shared.runtime.plain_text import indented_lines
from gspo_services.shared.settings import read_run_settings
from gspo_services.tasks.environments import MixedTasks, create_environment, create_task_set

LOOK_S: Final = 0.2
WAIT_S: Final = 15.0
EXIT_REFUSED: Final = 1
DESCRIPTION: Final = """\
Add the tasks of FILE to the training set of a run, also while it is running. The rows are read like those of the run's own
files. All are checked first: if one is bad, none is added; a row that is there already counts once. From then on, prompts
are drawn from the larger set. The file is copied into the run's directory, and the ledger names it with its digest.

  gspo data add runs/sums more.jsonl
  gspo data add runs/sums hard.jsonl --source olympiad     to one of several sources

If no broker is running, the next one adds the tasks when it starts. Status 0: added, or waiting for the broker; 1: refused.
"""


def data_command(words: Sequence[str]) -> int:
    """Parse and add. Returns the exit status. Raises: ValueError, OSError, ConfigurationError with texts for the user."""
    arguments = _parser().parse_args(words)
    directory, file = arguments.directory, arguments.file
    added = _additions(directory)
    tasks = _tasks_of(directory, added)
    names = [part.name for part in tasks.parts]
    source = arguments.source or names[0]
    if source not in names:
        raise ValueError(f'--source is "{source[:100]}": the run has {", ".join(names)}')
    digest = file_digest(file)
    known = next((row for row in added if row.digest == digest), None)
    if known is not None:
        print(f"{file}: its {known.num_tasks} tasks were added before, as addition {known.number}")
        return 0
    number = tasks.add(file)
    incoming = directory / INCOMING / ("" if source == names[0] else source) / file.name
    way_out = "wait for it, or give the file another name"
    with operation_on(directory, "data add"), only_operation(incoming, "data add", way_out):
        _hand_in(file, incoming, digest)
        print(f"{file}: {number} tasks for source {source}, on their way", flush=True)
        return _wait(directory, incoming, digest, arguments.wait)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo data", description="A run's training tasks.", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser(
        "add", help="add tasks to a run", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run's directory")
    add.add_argument("file", type=Path, metavar="FILE", help="rows as in the run's own files")
    add.add_argument("--source", metavar="NAME", help="the source to add the tasks to (default: the first one)")
    add.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="S", help="seconds to wait for the broker (default: %(default)g)"
    )
    return parser


def _tasks_of(directory: Path, added: Sequence[AdditionRow]) -> MixedTasks:
    """Load the run's training tasks as they are now. Raises: ValueError, ConfigurationError."""
    settings = read_run_settings(directory)
    create = create_task_set if settings.agent.is_used else create_environment
    with quiet_logs():  # Only the broker's log should say what it loads.
        tasks = create(settings.environment.name, settings.environment.options).tasks("train")
    if not isinstance(tasks, MixedTasks):
        name = settings.environment.name
        raise ValueError(f'the environment "{name}" reads no files: tasks can be added to those that do')
    read_additions(directory, tasks, added)
    return tasks


def _additions(directory: Path) -> list[AdditionRow]:
    with reading(directory) as connection, closing(connection):
        return Reader(directory / LEDGER_FILE, connection).rows(AdditionRow, "ORDER BY number")


def _hand_in(file: Path, incoming: Path, digest: str) -> None:
    """Copy the file to where the broker looks; it appears whole or not at all. Raises: ValueError for another file of that
    name that the broker has not taken yet; OSError."""
    if incoming.exists():
        with suppress(FileNotFoundError):  # The broker has just taken it.
            if file_digest(incoming) == digest:
                return
            raise ValueError(f"{incoming} is another file, on its way: start the broker, which takes it, or rename {file}")
    partial = partial_path(incoming)
    try:
        shutil.copyfile(file, partial)
        flush_file(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.rename(incoming)


def _wait(directory: Path, incoming: Path, digest: str, wait_s: float) -> int:
    """Wait until the ledger has the file ``incoming``, or it is refused."""
    end = time.monotonic() + wait_s
    refused = directory / REFUSED / f"{incoming.name}.reason.txt"
    while time.monotonic() < end:
        row = next((each for each in _additions(directory) if each.digest == digest), None)
        if row is not None:
            print(f"addition {row.number}: {row.num_tasks} tasks are in the ledger")
            return 0
        if not incoming.exists() and refused.exists():
            why = refused.read_text(encoding="utf-8").strip()
            print(indented_lines(f"gspo data: refused: {why}"), file=sys.stderr)
            return EXIT_REFUSED
        time.sleep(LOOK_S)
    print("the broker has not taken it yet: it takes it when it runs")
    return 0
