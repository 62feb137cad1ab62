"""One run of this project on a configuration: ``gspo run`` as a user starts it, and what it wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.against_trl.curve import Point, Run
from benchmarks.demo_seeds import served_at
from benchmarks.watch import SAMPLE_S, Watch
from benchmarks.whole_runs import rows_of
from tests.support.processes.run_process import RunProcess


def run_ours(
    config: Path,
    directory: Path,
    overrides: Sequence[str],
    *,
    setting: str,
    seed: int,
    target: float,
    until_target: bool,
    timeout_s: float,
) -> Run:
    """Run to the end of ``run.num_batches``, or to the target.

    Raises: AssertionError, with the end of its output, when the run fails.
    """
    watch = Watch()
    command_at = datetime.now().timestamp()
    with RunProcess(config, directory, *overrides) as run:
        root = psutil.Process(run.process.pid)
        deadline = time.monotonic() + timeout_s
        while run.process.poll() is None:
            assert time.monotonic() < deadline, f"the run did not end within {timeout_s:.0f} s:\n{run.tail()}"
            watch.look(root, len(run.rows("batch")))
            if until_target and any(row["eval/reward"] >= target for row in run.rows("eval")):
                break
            time.sleep(SAMPLE_S)
        else:
            assert run.process.returncode == 0, f"the run ended with status {run.process.returncode}:\n{run.tail()}"
    found = read_ours(directory, watch.cpu_s_of_a_batch(), setting=setting, seed=seed, command_at=command_at)
    return replace(found, target=target, peak_mib=watch.peak_mib, others_cores=watch.others_cores())


def read_ours(directory: Path, cpu_s: dict[str, float], *, setting: str, seed: int, command_at: float) -> Run:
    """Read what a finished run recorded; ``command_at`` is the wall time of its start."""
    rows = rows_of(directory)
    batches = [row for row in rows if row["event"] == "batch"]
    begin = min(served_at(directory))  # Samples could be drawn from then on.
    samples = [0]
    for row in batches:
        samples.append(samples[-1] + row["num_trajectories"])
    seconds = batches[-1]["time"] - begin
    train_s = sum(row["train_s"] for row in batches)
    profiles = [json.loads(line) for line in read_lines(directory / "profile.jsonl")]
    return Run(
        system="gspo",
        setting=setting,
        seed=seed,
        points=tuple(
            Point(seconds=row["time"] - begin, samples=samples[row["batch"]], evaluation_s=0.0, reward=row["eval/reward"])
            for row in rows
            if row["event"] == "eval"
        ),
        start_s=begin - command_at,
        batch_ends_s=tuple(row["time"] - begin for row in batches),
        seconds=seconds,
        batch_parts={
            "training": train_s / len(batches),
            "publication": sum(row["publish_s"] for row in batches) / len(batches),
            "waiting for samples": max(0.0, seconds - train_s - sum(row["publish_s"] for row in batches)) / len(batches),
        },
        cpu_s=cpu_s,
        rates={
            "generated, overall": sum(row["num_action_tokens"] for row in batches) / seconds,
            "trained, while training": sum(row["num_tokens"] for row in batches) / train_s,
        },
        tokens=token_statistics(sum(row["num_action_tokens"] for row in batches) / samples[-1], profiles, samples[-1]),
        learner_parts={name: fmean(each["seconds"][name] for each in profiles) for name in profiles[0]["seconds"]}
        if profiles
        else {},
    )


def token_statistics(mean_answer: float, profiles: Sequence[dict[str, Any]], num_samples: int) -> dict[str, float]:
    """Return the figures of rows padded to a batch's longest, as TRL has them; nothing is padded here."""
    if not profiles:
        return {"answer, mean": mean_answer}
    padded = sum(each["tokens"] / each["padding_efficiency"] for each in profiles)
    return {
        "answer, mean": mean_answer,
        "longest row of a batch": padded / num_samples,
        "share of padded rows that is tokens": sum(each["tokens"] for each in profiles) / padded,
    }


def read_lines(path: Path) -> list[str]:
    """Read the profile; None without a file: only runs that request a profile make one."""
    return path.read_text().splitlines() if path.is_file() else []
