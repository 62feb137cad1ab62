"""Whole runs as benchmarks make and compare them: ``gspo run`` as a user starts it, what it recorded, what is kept of it."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gspo_services.runs.metrics import RunMetrics, read_metrics

TARGET: Final = 0.85
"""The held-out reward to which the demo's runs are measured."""
GSPO: Final = (sys.executable, "-m", "gspo_services.cli.main")


def gspo(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command of this checkout. Raises: CalledProcessError if it fails."""
    subprocess.run([*GSPO, *arguments], check=True, env=environment)


def tiny_model(path: Path, seed: int, *, environment: Mapping[str, str] | None = None) -> None:
    """Make the demo's start model of this seed, if it is missing."""
    gspo("model", "tiny", str(path), "--seed", str(seed), "--if-missing", environment=environment)


def run_words(config: Path, directory: Path, *settings: str) -> list[str]:
    """Return the words after ``gspo`` of a run in ``directory``. ``settings``: "section.key=value"."""
    flags = [word for setting in (f"run.directory={directory}", *settings) for word in ("--set", setting)]
    return ["run", str(config), "--plain", *flags]


def run(config: Path, directory: Path, *settings: str, environment: Mapping[str, str] | None = None) -> RunMetrics:
    """Make a run in ``directory``, or go on with one that was stopped; a finished one stays as it is.

    Args:
        settings: "section.key=value".

    Returns: what it recorded. Raises: CalledProcessError.
    """
    gspo(*run_words(config, directory, *settings), environment=environment)
    return read_metrics(directory)


def seeded_run(
    config: Path,
    directory: Path,
    seed: int,
    *settings: str,
    model: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunMetrics:
    """Make or continue the run of a seed, which sets tasks and sampling. ``model``: its start; None: the seed's own.

    Returns: what it recorded. Raises: CalledProcessError.
    """
    if model is None:
        model = directory.parent / f"model-{seed}"
        tiny_model(model, seed)
    own = (f"run.seed={seed}", f"model.path={model.absolute()}")
    return run(config, directory.absolute(), *own, *settings, environment=environment)


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl as they are, also while it is written; none before there is a file."""
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else []


def batches_to_target(metrics: RunMetrics) -> int | None:
    """Return how many batches were trained when the held-out reward first reached TARGET; None: it never did."""
    return next((each.batch for each in metrics.evaluations if each.reward >= TARGET), None)


def num_dropped(metrics: RunMetrics) -> int:
    """Return how many groups were dropped."""
    return sum(row["event"] == "dropped" for _, row in metrics.events)


def options(doc: str | None, directory: str, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """Return a parser with the options that these benchmarks share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/arithmetic.toml"), help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="(default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path(directory), help="of all runs (default: %(default)s)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    return parser


def place(config: Path) -> str:
    """Return what a report begins with: configuration, day, machine."""
    return f"{config}, {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}"


def keep(path: Path, outcomes: Sequence[Any]) -> None:
    """Write dataclasses as JSON."""
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
