"""Balance the halves: a short run shows the cost of a token in each, which sets the length of the prompts."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Final

import structlog

from benchmarks.pipeline.measures import cpu_seconds, even_prompt, trained_batches
from benchmarks.pipeline.run import RunRecord, run_pinned
from benchmarks.pipeline.timeline import wall_time
from benchmarks.pipeline.workload import MARKERS, Cores, Workload, run_files, write_config

log = structlog.get_logger()

PILOT_BATCHES: Final = 3
TARGET: Final = 1.05
"""Seconds of training per second of generation: the agent and the weight updates are on SGLang's side."""
FEWEST_LETTERS, MOST_LETTERS = 8, 400
ROLLOUT_ROLES: Final = ("scheduler", "server", "agent")


async def balanced(
    workload: Workload, model: Path, cores: Cores, directory: Path, stop: asyncio.Event, limit_s: float
) -> Workload:
    """Return ``workload`` with prompts of a length that makes generation and training take about as long.

    Raises: the error of a failed run; TimeoutError after ``limit_s``.
    """
    config = directory / "config.toml"
    write_config(config, workload, model)
    files = run_files(config, directory / "run", num_batches=PILOT_BATCHES, max_lag=PILOT_BATCHES)
    letters = even_letters(await run_pinned(files, cores, stop, limit_s))
    return dataclasses.replace(workload, prompt_letters=letters)


def even_letters(pilot: RunRecord) -> int:
    """Make a run and derive the length from CPU time, so that waiting and other work do not matter."""
    samples, rows = pilot.watch.samples, pilot.rows
    loaded = wall_time(pilot.events("rollout-0", "weights_loaded")[0])
    trained = trained_batches(rows)
    return letters_for(
        rollout_cpu_s=cpu_seconds(samples, loaded, trained[-1].time, ROLLOUT_ROLES),
        # A learner's first batch takes longer than the next ones.
        learner_cpu_s=cpu_seconds(samples, trained[0].time, trained[-1].time, ("learner",)),
        action_tokens=sum(batch.action_tokens for batch in trained),
        learner_tokens=sum(int(row["num_tokens"]) for row in rows[1:]),
        episodes=sum(int(row["num_trajectories"]) for row in rows),
    )


def letters_for(
    *, rollout_cpu_s: float, learner_cpu_s: float, action_tokens: int, learner_tokens: int, episodes: int
) -> int:
    """Return the letters of a prompt.

    ``rollout_cpu_s`` is for the ``action_tokens`` of ``episodes``, ``learner_cpu_s`` for ``learner_tokens`` with prompts.
    """
    rollout_s, learner_s = rollout_cpu_s / action_tokens, learner_cpu_s / learner_tokens
    tokens = even_prompt(rollout_s=rollout_s, learner_s=learner_s, action_tokens=action_tokens / episodes, target=TARGET)
    letters = min(MOST_LETTERS, max(FEWEST_LETTERS, round(tokens) - MARKERS + 1))
    log.info(
        "balanced",
        rollout_us_per_action_token=round(rollout_s * 1e6),
        learner_us_per_token=round(learner_s * 1e6),
        prompt_letters=letters,
    )
    return letters
