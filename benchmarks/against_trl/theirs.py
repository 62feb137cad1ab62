"""One run of TRL on a configuration, as a child process, and what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.against_trl.curve import Point, Run
from benchmarks.against_trl.settings import Theirs
from benchmarks.watch import SAMPLE_S, Watch
from gspo_services.shared.runtime.lifecycle import die_with_parent

PARTS: Final = ("generation", "old log-probs", "evaluation")
"""Phases that ``trl_run`` times; the rest is training: forward, backward, optimizer, and TRL's code between them."""


def run_theirs(
    config: Path,
    directory: Path,
    overrides: Sequence[str],
    *,
    setting: str,
    trl: Theirs,
    seed: int,
    samples_per_batch: int,
    target: float,
    until_target: bool,
    timeout_s: float,
) -> Run:
    """Run to the end of ``run.num_batches``, or to the target.

    Raises: RuntimeError, with the end of its output, when the run fails.
    """
    directory.mkdir(parents=True)
    record, output = directory / "record.jsonl", directory / "output.log"
    command = [sys.executable, "-m", "benchmarks.against_trl.trl_run", str(config), "--threads", str(trl.threads)]
    command += ["--record", str(record), "--scratch", str(directory / "scratch")]
    if until_target:
        command += ["--until", str(target)]
    if trl.micro_batch is not None:
        command += ["--micro-batch", str(trl.micro_batch)]
    for override in [*overrides, *trl.overrides]:
        command += ["--set", override]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(trl.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    watch, deadline = Watch(), time.monotonic() + timeout_s
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, preexec_fn=partial(die_with_parent, parent_pid=os.getpid())
        )
        try:
            root = psutil.Process(process.pid)
            while process.poll() is None and time.monotonic() < deadline:
                watch.look(root, 0)
                time.sleep(SAMPLE_S)
        finally:
            in_time = process.poll() is not None
            process.kill()
            process.wait()
    if not in_time or process.returncode != 0:
        end = "\n".join(output.read_text(errors="replace").splitlines()[-25:])
        how = f"ended with status {process.returncode}" if in_time else f"did not end within {timeout_s:.0f} s"
        raise RuntimeError(f"TRL {how}:\n{end}")
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    run = read_theirs(rows, setting=setting, seed=seed, samples_per_batch=samples_per_batch)
    return replace(run, target=target, peak_mib=watch.peak_mib, others_cores=watch.others_cores())


def read_theirs(rows: Sequence[dict[str, Any]], *, setting: str, seed: int, samples_per_batch: int) -> Run:
    """Read what ``trl_run`` recorded. Raises: ValueError when the record has no batch or no end."""
    batches = [row for row in rows if row["event"] == "batch"]
    if not batches or rows[-1]["event"] != "end":
        raise ValueError(
            f"the record has {len(batches)} batches and ends with {rows[-1]['event']!r}: the run did not finish"
        )
    start, end = rows[0], rows[-1]
    count = len(batches)
    parts = {name: end["seconds_of"].get(name, 0.0) / count for name in PARTS}
    parts["training"] = end["seconds"] / count - sum(parts.values())
    cpu_s = {name: end["cpu_seconds_of"].get(name, 0.0) / count for name in PARTS}
    cpu_s["training"] = (end["cpu_s"] - start["cpu_s"]) / count - sum(cpu_s.values())
    trained_s = parts["training"] + parts["old log-probs"]
    return Run(
        system="trl",
        setting=setting,
        seed=seed,
        points=tuple(
            Point(
                seconds=row["seconds"],
                samples=row["batch"] * samples_per_batch,
                evaluation_s=row["evaluation_s"],
                reward=row["reward"],
            )
            for row in rows
            if row["event"] == "eval"
        ),
        start_s=start["start_s"],
        batch_ends_s=tuple(row["seconds"] for row in batches),
        seconds=end["seconds"],
        batch_parts=parts,
        cpu_s=cpu_s,
        rates={
            "generated, overall": end["generated_tokens"] / end["seconds"],
            "generated, while generating": end["generated_tokens"] / end["seconds_of"]["generation"],
            "trained, while training": end["packed_tokens"] / count / trained_s,
        },
        tokens={
            "answer, mean": end["generated_tokens"] / (count * samples_per_batch),
            "longest row of a batch": end["padded_tokens"] / (count * samples_per_batch),
            "share of padded rows that is tokens": end["packed_tokens"] / end["padded_tokens"],
        },
    )
