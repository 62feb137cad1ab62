"""``gspo data add RUN_DIR FILE``: add training tasks to a run, also while it is running."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from gspo.files import flush_file
from gspo_services.broker.refresh import INCOMING, REFUSED, read_additions
from gspo_services.broker.rows import AdditionRow
from gspo_services.broker.store import LEDGER_FILE, Reader, file_digest, reading
from gspo_services.runs.ledgers import ledger_directories
from gspo_services.shared.runtime.logs import quiet_logs
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
    ledgers = ledger_directories(directory)
    added = [_additions(each) for each in ledgers]
    tasks = _tasks_of(directory, ledgers, added)
    names = [part.name for part in tasks.parts]
    source = arguments.source or names[0]
    if source not in names:
        raise ValueError(f'--source is "{source[:100]}": the run has {", ".join(names)}')
    digest = file_digest(file)
    if len(ledgers) > 1:
        _require_one_at_a_time(ledgers, added, digest)
    known = next((row for rows in added for row in rows if row.digest == digest), None)
    lacking = [each for each, rows in zip(ledgers, added, strict=True) if all(row.digest != digest for row in rows)]
    if not lacking and known is not None:
        print(f"{file}: its {known.num_tasks} tasks were added before, as addition {known.number}")
        return 0
    # An interrupted command may have reached only some brokers: the others get what these have.
    number = tasks.add(file) if known is None else known.num_tasks
    incoming = {each: _hand_in(each, file, "" if source == names[0] else source) for each in lacking}
    print(f"{file}: {number} tasks for source {source}, on their way", flush=True)
    return _wait(incoming, digest, arguments.wait)


def _require_one_at_a_time(ledgers: Sequence[Path], added: Sequence[list[AdditionRow]], digest: str) -> None:
    """Require that no other addition is under way: all brokers count tasks alike, so all need the same files in one order.

    Raises: ValueError while another file has reached some brokers, and not yet all.
    """
    furthest = max(added, key=len)
    for ledger, rows in zip(ledgers, added, strict=True):
        for row in furthest[len(rows) :]:
            if row.digest != digest:
                raise ValueError(
                    f"addition {row.number} ({row.name}) is not in {ledger} yet, but other brokers of the run have it: "
                    "add that file again first, so that the brokers without it get it"
                )
        for waiting in sorted((ledger / INCOMING).glob("**/*")):
            if waiting.is_file() and not waiting.name.startswith(".") and file_digest(waiting) != digest:
                raise ValueError(
                    f"{waiting} is waiting, and brokers must take files in one order: wait until its broker runs "
                    "and takes it, or remove it"
                )


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


def _tasks_of(directory: Path, ledgers: Sequence[Path], added: Sequence[list[AdditionRow]]) -> MixedTasks:
    """Load the run's training tasks as they are now. Raises: ValueError, ConfigurationError."""
    settings = read_run_settings(directory)
    create = create_task_set if settings.agent.is_used else create_environment
    with quiet_logs():  # Only the broker's log should say what it loads.
        tasks = create(settings.environment.name, settings.environment.options).tasks("train")
    if not isinstance(tasks, MixedTasks):
        name = settings.environment.name
        raise ValueError(f'the environment "{name}" reads no files: tasks can be added to those that do')
    ledger, additions = max(zip(ledgers, added, strict=True), key=lambda each: len(each[1]))
    read_additions(ledger, tasks, additions)
    return tasks


def _additions(ledger: Path) -> list[AdditionRow]:
    with reading(ledger) as connection, closing(connection):
        return Reader(ledger / LEDGER_FILE, connection).rows(AdditionRow, "ORDER BY number")


def _hand_in(directory: Path, file: Path, source: str) -> Path:
    """Copy the file to where the broker looks; it appears whole or not at all."""
    folder = directory / INCOMING / source
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{os.getpid()}-{file.name}"
    try:
        shutil.copyfile(file, partial)
        flush_file(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    path = folder / file.name
    partial.rename(path)
    return path


def _wait(incoming: Mapping[Path, Path], digest: str, wait_s: float) -> int:
    """Wait until every ledger has it, or it is refused. ``incoming``: the file by the directory of its ledger."""
    end = time.monotonic() + wait_s
    left = dict(incoming)
    while time.monotonic() < end:
        for ledger, path in list(left.items()):
            row = next((each for each in _additions(ledger) if each.digest == digest), None)
            refused = ledger / REFUSED / f"{path.name}.reason.txt"
            if row is not None:
                del left[ledger]
                if not left:
                    print(f"addition {row.number}: {row.num_tasks} tasks are in the ledger")
                    return 0
            elif not path.exists() and refused.exists():
                why = refused.read_text(encoding="utf-8").strip()
                print(indented_lines(f"gspo data: refused: {why}"), file=sys.stderr)
                return EXIT_REFUSED
        time.sleep(LOOK_S)
    where = "" if len(incoming) == 1 else f" ({', '.join(map(str, left))})"
    print(f"the broker has not taken it yet{where}: it takes it when it runs")
    return 0
