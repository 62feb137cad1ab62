"""SIGKILL of rollouts, agents' workers, the broker and SGLang amid agents' episodes. ``make test-faults``."""

import json
import random
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gspo_services.broker.ledger.sampling.task_order import trajectory_seed
from gspo_services.broker.store.reader import LEDGER_FILE
from tests.faults.fleet import Fleet
from tests.faults.killing import count, kill, wait_for_episodes
from tests.support.broker.ledger_audit import audit
from tests.support.policy.noting_agent import reads_the_clock

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]
RUN_SEED = 0
KILLS = 30
CHUNK_TOKENS = 4
MAX_RUNNING = 16
MOST_CALLS = 2
"""Of an episode at a time."""
LIFE = "server_args="
FIRST_WEIGHTS = "[continue_generation]"
STEP = re.compile(r"Decode batch, #running-req: (\d+),|Prefill batch, #new-seq: (\d+),")
ONE_STEP_A_LINE = 'rollout.server_args=["--decode-log-interval","1","--disable-overlap-schedule","--disable-radix-cache"]'
VICTIMS = ("rollout", "worker", "worker", "broker", "sglang")
ROLLOUTS = ("rollout-0", "rollout-1")


def test_agents_survive_kills_and_repeat_neither_tokens_nor_side_effects(tmp_path: Path) -> None:
    rng, killed = random.Random(0), Counter[str]()
    notes = tmp_path / "notes"
    settings = (
        "agent.function=tests.support.policy.noting_agent:solve", f"agent.environment.GSPO_TEST_NOTES={notes}",
        "agent.deadline_s=120",
        "sampling.max_tokens=128", "sampling.max_episode_tokens=1024", "broker.max_attempts=20",
        f"rollout.max_running={MAX_RUNNING}", f"rollout.chunk_tokens={CHUNK_TOKENS}", ONE_STEP_A_LINE,
    )  # fmt: skip
    with Fleet(tmp_path, *settings) as fleet:
        fleet.start("broker")
        fleet.start("learner")
        for name in ROLLOUTS:
            fleet.start("rollout", name=name)
        fleet.wait_batches(1)
        while killed.total() < KILLS:
            wait_for_episodes(fleet, rng.randint(4, 40))
            victim, name = rng.choice(VICTIMS), rng.choice(ROLLOUTS)
            killed[victim] += kill(fleet, victim, name)
        fleet.wait_batches(len(fleet.rows("batch")) + 1)
        fleet.finish()
    assert not [victim for victim in VICTIMS if not killed[victim]], killed
    report = audit(tmp_path)
    print(dict(killed), f"{report.num_trained_again} trained again", flush=True)
    assert report.problems == []
    assert report.num_trained_again == 0
    check_trajectories(tmp_path)
    check_regenerated(tmp_path, killed)
    seeds = Counter(notes.read_text().split())
    again = [seed for seed, times in seeds.items() if times > 1]
    print(f"{len(seeds)} side effects, {len(again)} of them again", flush=True)
    # One can be lost between the side effect and the word that its record is durable.
    assert sum(times - 1 for times in seeds.values()) <= killed.total()


def check_trajectories(directory: Path) -> None:
    """Episodes that repeat themselves lose no turn; those that do not go on, and what they left is discarded."""
    with closing(sqlite3.connect(f"file:{directory / LEDGER_FILE}?mode=ro", uri=True)) as connection:
        found: list[Any] = connection.execute(
            "SELECT trajectory_id, discarded_turns, epoch FROM trajectories WHERE status = 'finished'"
        ).fetchall()
    discarded = [trajectory_seed(RUN_SEED, trajectory_id) for trajectory_id, turns, _ in found if json.loads(turns)]
    resumed = sum(epoch > 1 for _, _, epoch in found)
    print(f"{len(found)} episodes, {resumed} under several leases, {len(discarded)} diverged", flush=True)
    assert resumed > KILLS, "the kills hit hardly anything"
    assert discarded, "no agent that reads the clock was hit"
    assert [seed for seed in discarded if not reads_the_clock(seed)] == []


def check_regenerated(directory: Path, killed: Counter[str]) -> None:
    """What the engines have generated beyond what is recorded: at most a chunk of each call under way at each kill."""
    stored = count(directory, "1", "sum(num_action_tokens)")
    generated = sum(generated_by(directory / "logs" / f"{name}-sglang.log") for name in ROLLOUTS)
    most = (killed["rollout"] + killed["sglang"]) * MAX_RUNNING * MOST_CALLS * CHUNK_TOKENS
    print(f"{generated} tokens generated, {stored} recorded: {generated - stored} again, {most} allowed", flush=True)
    assert 0 <= generated - stored <= most


def generated_by(log: Path) -> int:
    """Tokens that an engine has generated in all of its lives; before its first weights it only warms up."""
    lives = log.read_text(errors="replace").split(LIFE)[1:]
    steps = [step for life in lives for step in STEP.findall(life.partition(FIRST_WEIGHTS)[2])]
    return sum(int(decoded or prefilled) for decoded, prefilled in steps)
