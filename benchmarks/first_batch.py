"""How long after ``gspo run`` the first batch is trained, by phase, and how long a killed process takes to be back.

    python -m benchmarks.first_batch examples/smollm2.toml --repeat 3
    python -m benchmarks.first_batch examples/arithmetic.toml --cold --restarts

Engine and learner start at the same time; the rows are the moments of a run, in seconds since the command, as the median and
the range of the repeats. --cold empties the machine's page cache before each (root). --restarts then kills each process of
the last run once, and waits until its work goes on: a batch trained, or verified weights served.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.markdown import table as markdown
from benchmarks.watch import said_of, watched
from tests.support.processes.run_process import RunProcess

TIMEOUT_S: Final = 600.0
MOMENTS: Final = (
    ("the broker listens", "broker", "broker_started"),
    ("the learner has loaded the model and published it", "learner", "published"),
    ("SGLang is started", "rollout-0", "engine_server_started"),
    ("SGLang answers", "rollout-0", "engine_server_ready"),
    ("the rollout serves the first version, verified", "rollout-0", "weights_loaded"),
    ("the first batch is sampled", "broker", "batch_assembled"),
    ("the first batch is trained", "learner", "batch_trained"),
)
"""What a run reaches, and the first event that says so."""
KILLED: Final = (
    ("broker", "gspo_services.broker", "learner", "batch_trained"),
    ("learner", "gspo_services.learner", "learner", "batch_trained"),
    ("rollout with its engine", "gspo_services.rollout", "rollout-0", "weights_loaded"),
)
"""A process, its module, and the event by which its work goes on."""


def time_of(event: dict[str, Any]) -> float:
    """When it was logged, as a wall time."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def moments(run: RunProcess, begin: float) -> dict[str, float]:
    """Seconds from the command to each of MOMENTS."""
    return {name: time_of(run.events(process, event)[0]) - begin for name, process, event in MOMENTS}


def restarts(run: RunProcess) -> dict[str, float]:
    """Seconds from the end of each process to its work."""
    found = {}
    for name, module, process, event in KILLED:
        killed_at = datetime.now(UTC).timestamp()
        run.kill(module)

        def seconds(process: str = process, event: str = event, since: float = killed_at) -> list[float]:
            return [time_of(each) - since for each in run.events(process, event) if time_of(each) > since]

        run.wait_until(f"{event} after the end of the {name}", lambda: bool(seconds()), TIMEOUT_S)
        found[name] = seconds()[0]
    return found


def measured(config: Path, overrides: Sequence[str], *, with_restarts: bool) -> tuple[dict[str, float], dict[str, float]]:
    """One run, to its first batch or a little further."""
    with tempfile.TemporaryDirectory(prefix="first-batch-") as directory:
        begin = datetime.now(UTC).timestamp()
        with RunProcess(config, Path(directory), *overrides) as run:
            run.wait_until("the first batch", lambda: bool(run.events("learner", "batch_trained")), TIMEOUT_S)
            return moments(run, begin), restarts(run) if with_restarts else {}


def drop_page_cache() -> None:
    """Forget the files that the machine has read. Raises: SystemExit unless root."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise SystemExit(f"--cold needs root: {error}") from error


def report(starts: Sequence[dict[str, float]], back: dict[str, float], others_cores: float) -> str:
    """Return Markdown: seconds; on a busy machine shares of the time to the first trained batch."""
    said = said_of(others_cores)
    unit_s = median(start[MOMENTS[-1][0]] for start in starts) if said else 1.0
    tables = [table(starts, "since the command", unit_s)]
    tables += [table([back], "killed, until its work goes on", unit_s)] if back else []
    return "\n\n".join([*tables, *([said] if said else [])])


def table(rows: Sequence[dict[str, float]], heading: str, unit_s: float = 1.0) -> str:
    """Markdown: medians, and ranges where there are several. ``unit_s``: the time of which shares are shown; 1: seconds."""
    digits, unit = (1, "seconds") if unit_s == 1.0 else (2, "share of the time to the first trained batch")
    lines = []
    for name in rows[0]:
        values = sorted(row[name] / unit_s for row in rows)
        spread = f" ({values[0]:.{digits}f} to {values[-1]:.{digits}f})" if len(values) > 1 else ""
        lines.append((name, f"{median(values):.{digits}f}{spread}"))
    return markdown([heading, unit], lines)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="with an empty page cache")
    parser.add_argument("--restarts", action="store_true", help="kill each process of the last run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", type=Path, default=Path("runs/first_batch.json"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    starts, back = [], {}
    with watched() as watch:
        for index in range(arguments.repeat):
            if arguments.cold:
                drop_page_cache()
            is_last = index == arguments.repeat - 1
            found, back = measured(arguments.config, arguments.overrides, with_restarts=arguments.restarts and is_last)
            starts.append(found)
        others = watch.others_cores()
    print(f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {arguments.config}{', cold' if arguments.cold else ''}\n")
    print(report(starts, back, others))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"starts": starts, "restarts": back, "others_cores": others}, indent=1) + "\n")


if __name__ == "__main__":
    main()
