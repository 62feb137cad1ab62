"""How long this project and TRL take to a held-out reward of 0.85, from the same model, on the same machine.

    .venv-parity/bin/python -m benchmarks.against_trl --seeds 0 1 2

Both train `examples/arithmetic.toml`: the same start model, tasks, prompt ids, rewards, samples of a batch, optimizer steps,
optimizer, learning rate and clip, and the same held-out tasks after every second batch. This project is `gspo run`, as a
user starts it; TRL is `trl_run.py`. They take turns on the machine. Seconds count from the moment at which the first sample
can be drawn: imports, loading and the start of SGLang are excluded for both, evaluations are included for both. Each is
tried with its settings on the first seed, and runs the other seeds with the better one. Needs TRL (requirements/parity.txt).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.against_trl.curve import Run, System
from benchmarks.against_trl.ours import run_ours
from benchmarks.against_trl.report import Comparison, as_data, chosen_setting, parts_table, plot, table, verdict
from benchmarks.against_trl.settings import OURS, THEIRS, TIMEOUT_S, say
from benchmarks.against_trl.theirs import run_theirs
from services.runtime.configuration import load_settings


def main() -> None:
    """Run, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/arithmetic.toml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batches", type=int, default=30, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=2, help="batches from one evaluation to the next (default: %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, help="start from this model, whatever the seed (default: a tiny one of the seed)"
    )
    parser.add_argument("--ours", nargs="+", choices=OURS, default=list(OURS), help="settings of this project to try")
    parser.add_argument("--theirs", nargs="+", choices=THEIRS, default=list(THEIRS), help="settings of TRL to try")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", type=Path, default=Path("runs/against-trl.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images/against-trl.png"))
    arguments = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed here: `make test-parity` makes .venv-parity, whose python runs this")
    overrides = [f"run.num_batches={arguments.batches}", f"evaluation.every_batches={arguments.every}", *arguments.overrides]
    settings = load_settings(arguments.config, overrides)
    # So that `kill` ends what was started, and removes what was written, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="against-trl-") as directory:
        runs = all_runs(
            arguments.config,
            Path(directory),
            overrides,
            seeds=arguments.seeds,
            model=arguments.model,
            ours=arguments.ours,
            theirs=arguments.theirs,
            samples_per_batch=settings.batch.groups_per_batch * settings.batch.group_size,
        )
    comparison = Comparison.of(
        runs,
        mini_batches=settings.batch.mini_batches,
        samples_per_batch=settings.batch.groups_per_batch * settings.batch.group_size,
    )
    heading = f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.machine()}, {' '.join(sys.argv[1:])}"
    print(f"\n{heading}\n\n{table(comparison)}\n\n{parts_table(comparison)}\n\n{verdict(comparison)}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    data = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": os.cpu_count(), "arguments": sys.argv[1:]}
    arguments.json.write_text(json.dumps(data | as_data(comparison), indent=1) + "\n")
    plot(comparison, arguments.plot)


def all_runs(
    config: Path,
    directory: Path,
    overrides: Sequence[str],
    *,
    seeds: Sequence[int],
    model: Path | None,
    ours: Sequence[str],
    theirs: Sequence[str],
    samples_per_batch: int,
) -> list[Run]:
    """Every setting on the first seed, the better one of each system on the others, in turns."""
    runs: list[Run] = []
    for index, seed in enumerate(seeds):
        start = start_model(directory, seed) if model is None else model
        common = [*overrides, f"run.seed={seed}", f"model.path={start}"]
        best: dict[System, str] = {}
        if index > 0:
            best = {system: chosen_setting([run for run in runs if run.system == system]) for system in ("gspo", "trl")}
        for setting in ours if index == 0 else [best["gspo"]]:
            place = directory / f"ours-{seed}-{setting.replace(' ', '-')}"
            say(f"seed {seed}: this project, {setting}")
            runs.append(run_ours(config, place, [*common, *OURS[setting]], setting=setting, seed=seed, timeout_s=TIMEOUT_S))
            say(f"  {runs[-1]}")
        for setting in theirs if index == 0 else [best["trl"]]:
            place = directory / f"theirs-{seed}-{setting.replace(' ', '-')}"
            say(f"seed {seed}: TRL, {setting}")
            runs.append(
                run_theirs(
                    config,
                    place,
                    common,
                    setting=setting,
                    threads=THEIRS[setting],
                    seed=seed,
                    samples_per_batch=samples_per_batch,
                    timeout_s=TIMEOUT_S,
                )
            )
            say(f"  {runs[-1]}")
    return runs


def start_model(directory: Path, seed: int) -> Path:
    """The tiny model of a seed, as a user makes it."""
    path = directory / f"model-{seed}"
    say(f"seed {seed}: the start model")
    command = [sys.executable, "-m", "services.cli.main", "model", "tiny", str(path), "--seed", str(seed)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


if __name__ == "__main__":
    main()
