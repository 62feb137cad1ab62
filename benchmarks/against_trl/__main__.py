"""How long this project and TRL take to a held-out reward (0.85, of SmolLM2 0.7), from the same model, on the same machine.

    .venv-parity/bin/python -m benchmarks.against_trl --seeds 0 1 2
    .venv-parity/bin/python -m benchmarks.against_trl --task counting
    .venv-parity/bin/python -m benchmarks.against_trl --task sums --seeds 0 1 2

Both train a task's configuration: ``examples/arithmetic.toml``, where answers have three tokens and most of a sample's cost
lies outside the model, ``counting.toml`` next to this file, where a few answers are far longer than the mean and most of the
cost lies in the model, or ``examples/smollm2.toml``, with a model that somebody else made. Both have the same start model,
tasks, prompt ids, rewards, samples of a batch, optimizer steps, optimizer and learning rate, and the same held-out tasks
after every second batch. A run that is finished is kept in runs/against-trl, and another call goes on from there. This
project is ``gspo run``, as a user starts it; TRL is ``trl_run.py``. They take turns on the machine. Seconds count from the
moment at which the first sample can be drawn: imports, loading and the start of SGLang are excluded for both, evaluations
are included. Each tries its settings on the first seed, and runs the other seeds with the better one. Needs TRL
(requirements/parity.txt).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.against_trl.curve import Run, System
from benchmarks.against_trl.kept import kept
from benchmarks.against_trl.ours import run_ours
from benchmarks.against_trl.report import (
    Comparison,
    as_data,
    chosen_setting,
    learner_table,
    parts_table,
    plot,
    table,
    verdict,
)
from benchmarks.against_trl.settings import TASKS, TIMEOUT_S, Task, TaskName, Theirs, say
from benchmarks.against_trl.theirs import run_theirs
from gspo_services.shared.settings import load_settings


def main() -> None:
    """Run, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="arithmetic")
    parser.add_argument("--config", type=Path, help="train this configuration instead of the task's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batches", type=int, help="batches of each run (default: the task's own number)")
    parser.add_argument("--every", type=int, default=2, help="batches between evaluations (default: %(default)s)")
    parser.add_argument(
        "--model", type=Path, help="start from this model for every seed (default: the task's own, made from the seed)"
    )
    parser.add_argument("--ours", nargs="+", help="settings of this project to try (default: all for the task)")
    parser.add_argument("--theirs", nargs="+", help="settings of TRL to try (default: all for the task)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--again", action="store_true", help="make runs that are finished and kept again")
    parser.add_argument("--json", type=Path, help="(default: runs/against-trl-TASK.json)")
    parser.add_argument("--plot", type=Path, help="(default: below runs, and for sums the picture in docs)")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    for tried, known in ((arguments.ours, task.ours), (arguments.theirs, task.theirs)):
        if unknown := set(tried or ()) - set(known):
            parser.error(f"no such setting: {', '.join(sorted(unknown))}; the task {arguments.task} has {', '.join(known)}")
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed here: `make test-parity` makes .venv-parity, whose python runs this")
    config = arguments.config or task.config
    overrides = [
        f"run.num_batches={arguments.batches or task.num_batches}",
        f"evaluation.every_batches={arguments.every}",
        *arguments.overrides,
    ]
    settings = load_settings(config, overrides)
    kept_in = Path(f"runs/against-trl/{arguments.task}")
    if arguments.again:
        shutil.rmtree(kept_in, ignore_errors=True)
    # ``kill`` ends the child processes and removes files, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="against-trl-") as directory:
        runs = all_runs(
            config,
            Path(directory),
            overrides,
            seeds=arguments.seeds,
            model=(lambda directory, seed: arguments.model) if arguments.model else START_MODELS[arguments.task],
            ours={name: task.ours[name] for name in arguments.ours or task.ours},
            theirs={name: task.theirs[name] for name in arguments.theirs or task.theirs},
            task=task,
            kept_in=kept_in,
            samples_per_batch=settings.batch.groups_per_batch * settings.batch.group_size,
        )
    comparison = Comparison.of(
        runs,
        mini_batches=settings.batch.mini_batches,
        samples_per_batch=settings.batch.groups_per_batch * settings.batch.group_size,
    )
    heading = f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.machine()}, {' '.join(sys.argv[1:])}"
    tables = [table(comparison), parts_table(comparison), learner_table(comparison), verdict(comparison)]
    print("\n\n".join([f"\n{heading}", *filter(None, tables)]))
    json_path = arguments.json or Path(f"runs/against-trl-{arguments.task}.json")
    json_path.parent.mkdir(parents=True, exist_ok=True)
    data = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": os.cpu_count(), "arguments": sys.argv[1:]}
    json_path.write_text(json.dumps(data | as_data(comparison), indent=1) + "\n")
    plot(comparison, arguments.plot or task.plot)


def all_runs(
    config: Path,
    directory: Path,
    overrides: Sequence[str],
    *,
    seeds: Sequence[int],
    model: Callable[[Path, int], Path],
    ours: Mapping[str, list[str]],
    theirs: Mapping[str, Theirs],
    task: Task,
    kept_in: Path,
    samples_per_batch: int,
) -> list[Run]:
    """Run every setting on the first seed, then each system's best setting on the other seeds, in turns.

    ``kept_in``: where finished runs are and stay.
    """
    runs: list[Run] = []
    until: dict[str, Any] = {"target": task.target, "until_target": task.until_target}
    goal = until | {"timeout_s": TIMEOUT_S}
    made_of = until | {"config": config.read_text(), "overrides": [*overrides]}
    for index, seed in enumerate(seeds):
        best: dict[System, str] = {}
        if index > 0:
            best = {system: chosen_setting([run for run in runs if run.system == system]) for system in ("gspo", "trl")}
        common = [*overrides, f"run.seed={seed}", f"model.path={model(directory, seed)}"]
        for setting in ours if index == 0 else [best["gspo"]]:
            place = directory / f"ours-{seed}-{setting.replace(' ', '-')}"
            say(f"seed {seed}: this project, {setting}")
            mine = [*common, "learner.profile=true", *ours[setting]]
            make = partial(run_ours, config, place, mine, setting=setting, seed=seed, **goal)
            runs.append(
                kept(kept_in, made_of | {"system": "gspo", "seed": seed, "set": ours[setting], "of": commit()}, make)
            )
        for setting in theirs if index == 0 else [best["trl"]]:
            place = directory / f"theirs-{seed}-{setting.replace(' ', '-')}"
            say(f"seed {seed}: TRL, {setting}")
            make = partial(
                run_theirs,
                config,
                place,
                common,
                setting=setting,
                trl=theirs[setting],
                seed=seed,
                samples_per_batch=samples_per_batch,
                **goal,
            )
            runs.append(kept(kept_in, made_of | {"system": "trl", "seed": seed, "set": asdict(theirs[setting])}, make))
    return runs


def commit() -> str:
    """The version of this project's code: a run of another one is made again."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def tiny_model(directory: Path, seed: int) -> Path:
    """Make the tiny model of a seed, as a user does."""
    return _made(directory / f"model-{seed}", "gspo_services.cli.main", "model", "tiny", seed=seed)


def counting_model(directory: Path, seed: int) -> Path:
    """Make the larger model, taught the task with long-tailed answers; it is kept, because it takes minutes."""
    return _made(Path(f"runs/against-trl/counting-{seed}").absolute(), "benchmarks.against_trl.start_model", seed=seed)


def _made(path: Path, module: str, *command: str, seed: int) -> Path:
    say(f"seed {seed}: the start model")
    arguments = [sys.executable, "-m", module, *command, str(path), "--seed", str(seed)]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return path


def smollm2(directory: Path, seed: int) -> Path:
    """The same model for every seed: ``make models/smollm2/config.json`` fetches it."""
    return Path("models/smollm2").absolute()


START_MODELS: Final[dict[TaskName, Callable[[Path, int], Path]]] = {
    "arithmetic": tiny_model,
    "counting": counting_model,
    "sums": smollm2,
}
"""Makes a task's start model, from a directory for temporary files and a seed."""


if __name__ == "__main__":
    main()
