"""How many tokens an end of a rollout costs, and SIGTERM of each role while it is busy. ``make test-faults``."""

import re
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from gspo_services.broker.store.reader import LEDGER_FILE
from tests.faults.fleet import Fleet
from tests.support.broker.ledger_audit import audit

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]
ONE_STEP_A_LINE = 'rollout.server_args=["--decode-log-interval","1","--disable-overlap-schedule","--disable-radix-cache"]'
"""SGLang logs every step as it makes it, so every generated token can be counted, even of a server that was killed."""
STEP = re.compile(r"Decode batch, #running-req: (\d+),|Prefill batch, #new-seq: (\d+),")
FIRST_WEIGHTS = "[continue_generation]"
DRAIN_S = 10.0
GRACE_S = 20.0
"""Time beyond rollout.drain_s in which SGLang must end."""
LEARNER_STOP_S = 60.0
"""Time to finish the batch under way and save a checkpoint."""
ARRIVES_S = 1.0
MAX_RUNNING = 24
BUSY_TOKENS = 400


@dataclass(frozen=True)
class Cost:
    """What one end of a rollout cost."""

    signal: str
    chunk_tokens: int
    unfinished: int
    generated: int
    regenerated: int

    @property
    def per_trajectory(self) -> float:
        return self.regenerated / max(1, self.unfinished)


class Books:
    """Counts the tokens that SGLang generated in each life of a rollout, and how many of them are in the ledger."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._engine_log = fleet.directory / "logs" / f"{name}-sglang.log"
        self._begin = 0
        self._stored_before = 0

    def generated(self) -> int:
        """Tokens that the server has generated in its current life: each step gives each request one."""
        with self._engine_log.open("rb") as file:
            file.seek(self._begin)
            # Before its first weights it only warms up.
            text = file.read().decode(errors="replace").partition(FIRST_WEIGHTS)[2]
        steps = STEP.findall(text)
        return sum(int(decoded or prefilled) for decoded, prefilled in steps)

    def stored(self) -> int:
        """Action tokens of this life that the broker has acknowledged."""
        return self._actions() - self._stored_before

    def next_life(self) -> None:
        self._begin = self._engine_log.stat().st_size
        self._stored_before = self._actions()

    def unfinished(self) -> int:
        return self._count("count(*)", "status = 'leased'")

    def _actions(self) -> int:
        return self._count("sum(num_action_tokens)")

    def _count(self, what: str, where: str = "1") -> int:
        path = self._fleet.directory / LEDGER_FILE
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            (value,) = connection.execute(f"SELECT {what} FROM trajectories WHERE {where}").fetchone()
        return int(value or 0)


def end(fleet: Fleet, books: Books, number: signal.Signals, chunk_tokens: int) -> Cost:
    """Start a rollout, end it when it is busy, and count. An unfinished step of SGLang is not in its log."""
    rollout = fleet.start("rollout", f"rollout.chunk_tokens={chunk_tokens}", ONE_STEP_A_LINE, name="rollout-0")
    fleet.wait_until("work", lambda: bool(fleet.rows("batch")) and books.stored() > BUSY_TOKENS, 900)
    fleet.wait_until("leases", lambda: books.unfinished() > 8)
    unfinished = books.unfinished()
    rollout.keep = False
    begin = time.monotonic()
    rollout.signal(number)
    fleet.wait_until("the end of it", lambda: not rollout.look(), 60)
    assert time.monotonic() - begin < DRAIN_S + GRACE_S
    assert rollout.ends == [0 if number == signal.SIGTERM else -number]
    arrived = time.monotonic() + ARRIVES_S
    fleet.wait_until("messages on their way", lambda: time.monotonic() > arrived)
    # The leases of a killed rollout last for a while; a rollout that was told to stop has handed its trajectories back.
    unfinished = max(unfinished, books.unfinished())
    cost = Cost(number.name, chunk_tokens, unfinished, books.generated(), books.generated() - books.stored())
    books.next_life()
    return cost


def test_a_kill_of_a_rollout_costs_at_most_a_chunk_a_trajectory_and_an_orderly_end_a_step(tmp_path: Path) -> None:
    costs: list[Cost] = []
    settings = ("learner.checkpoint_every_batches=10", f"rollout.max_running={MAX_RUNNING}")
    with Fleet(tmp_path, *settings) as fleet:
        fleet.start("broker")
        fleet.start("learner")
        books = Books(fleet, "rollout-0")
        for chunk_tokens in (4, 16):
            for number in (signal.SIGKILL, signal.SIGTERM):
                costs.append(end(fleet, books, number, chunk_tokens))
                print(costs[-1], f"{costs[-1].per_trajectory:.1f} a trajectory", flush=True)
        fleet.start("rollout", ONE_STEP_A_LINE, name="rollout-0")
        # Learner and broker end while they are busy, too.
        for name in ("learner", "broker"):
            fleet.wait_batches(len(fleet.rows("batch")) + 2)
            fleet.stop(name, LEARNER_STOP_S)
            assert fleet.members[name].ends == [0]
            fleet.members[name].start()
            fleet.members[name].keep = True
        fleet.finish()
        # The counts agree where nothing was lost: the last life ended with the run.
        assert books.generated() == books.stored()
    assert fleet.events("broker", "attempt_failed") == []
    for cost in costs:
        assert cost.unfinished > 8, "the rollout was not busy"
        # Told to stop, a rollout hands back whatever its engine has made; a step is under way when it is told.
        most = cost.chunk_tokens if cost.signal == "SIGKILL" else 1
        # A server sends the tokens of a step before it logs the step, and may end between the two.
        assert -MAX_RUNNING <= cost.regenerated <= cost.unfinished * most, cost
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_trained_again == 0
