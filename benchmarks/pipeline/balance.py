"""Makes the halves even: a short run says what a token costs each, and the length of the prompts is chosen by it."""

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from benchmarks.pipeline.measures import cpu_shares, even_prompt, trained_batches
from benchmarks.pipeline.run import RunRecord, run_pinned
from benchmarks.pipeline.timeline import wall_time
from benchmarks.pipeline.workload import MARKERS, Cores, Workload, run_files, write_config

log = structlog.get_logger()

PILOT_BATCHES: Final = 3
TARGET: Final = 1.05
"""Seconds of training to one of generation: the agent and the weight updates are on SGLang's side."""
FEWEST_LETTERS, MOST_LETTERS = 8, 400
ROLLOUT_ROLES: Final = ("scheduler", "server", "agent")


async def balanced(
    workload: Workload, model: Path, cores: Cores, directory: Path, stop: asyncio.Event, limit_s: float
) -> Workload:
    """``workload`` with prompts of such a length that generation and training take about as long.

    Raises: what a run ends with; TimeoutError after ``limit_s``.
    """
    config = directory / "config.toml"
    write_config(config, workload, model)
    files = run_files(config, directory / "run", num_batches=PILOT_BATCHES, max_lag=PILOT_BATCHES)
    letters = even_letters(await run_pinned(files, cores, stop, limit_s))
    return dataclasses.replace(workload, prompt_letters=letters)


def even_letters(pilot: RunRecord) -> int:
    """From a run to its end: by processor time, so that it does not matter who waited for whom, nor what else ran."""
    begin = wall_time(pilot.events("rollout-0", "weights_loaded")[0])
    end = trained_batches(pilot.rows)[-1].time
    return letters_for(cpu_shares(pilot.watch.samples, begin, end), end - begin, totals(pilot))


def totals(pilot: RunRecord) -> dict[str, int]:
    """Tokens, action tokens and episodes of all batches."""
    names = ("num_tokens", "num_action_tokens", "num_trajectories")
    return {name: sum(int(row[name]) for row in pilot.rows) for name in names}


def letters_for(cores_used: Mapping[str, float], seconds: float, total: Mapping[str, int]) -> int:
    """Letters of a prompt. ``cores_used``: on average over ``seconds``, in which ``total`` was generated and trained."""
    rollout_s = sum(cores_used.get(role, 0.0) for role in ROLLOUT_ROLES) * seconds / total["num_action_tokens"]
    learner_s = cores_used["learner"] * seconds / total["num_tokens"]
    tokens = even_prompt(
        rollout_s=rollout_s,
        learner_s=learner_s,
        action_tokens=total["num_action_tokens"] / total["num_trajectories"],
        target=TARGET,
    )
    letters = min(MOST_LETTERS, max(FEWEST_LETTERS, round(tokens) - MARKERS + 1))
    log.info(
        "balanced",
        rollout_us_per_action_token=round(rollout_s * 1e6),
        learner_us_per_token=round(learner_s * 1e6),
        prompt_letters=letters,
    )
    return letters
