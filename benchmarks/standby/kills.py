"""Kills the leading broker and the primary PostgreSQL at once, under load, again and again.

    python -m benchmarks.standby.kills --kills 20 --json kills.json

Two brokers, three servers (a primary and two standbys, of which one must have each commit), rollouts that stream chunks
and a learner that takes batches. After each kill the standby server that has most is promoted at once: what finds the dead
primary elsewhere (Patroni, CloudNativePG) takes its own time, which is not in these figures. The dead server is built again
as a standby, the dead broker is started again. At the end each acknowledged chunk is looked for in the last broker's ledger.
"""

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import zmq.asyncio

from benchmarks.standby.load import missing, regenerated
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, eventually
from tests.support.postgres.trio import Trio, trio

TAKEOVER_S: Final = 3.0
PATIENCE_S: Final = 90.0
CHUNKS_BETWEEN: Final = 300
ROLLOUTS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill of both, by the steady clock."""

    serves_s: float
    """Until the standby broker serves..."""
    goes_on_s: float
    """...until a chunk that was not acknowledged before is..."""
    promoted_s: float
    """...and until the other server took commits."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All of them."""

    kills: list[Kill]
    acknowledged: int
    lost: int
    sent_tokens: int
    regenerated_tokens: int
    failed_attempts: int
    batches: int
    batches_out_of_order: int


async def measure(directory: Path, num_kills: int, kill_database: bool = True) -> Outcome:
    """Kill ``num_kills`` times. ``kill_database``: the primary server, too."""
    servers = trio()
    nodes = await asyncio.to_thread(servers.__enter__)
    context = zmq.asyncio.Context()
    brokers = _brokers(directory, nodes.conninfo)
    rollouts = [
        ScriptedRollout(context, brokers[0].work_endpoint, f"r{index}", "s", action_tokens=160, chunk_delay_s=0.03)
        for index in range(ROLLOUTS)
    ]
    learner = ScriptedLearner(context, brokers[0].batch_endpoint, "s", train_s=0.2)
    try:
        await brokers[0].start()
        await brokers[1].launch()
        await brokers[1].logged("standby")
        works = [*(rollout.run() for rollout in rollouts), learner.run()]
        running = [asyncio.get_running_loop().create_task(work) for work in works]
        kills = [await _kill(brokers, nodes, rollouts, kill_database) for _ in range(num_kills)]
        await _some_work(rollouts, CHUNKS_BETWEEN)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await brokers[0].terminate()
        acknowledged, lost = missing(brokers[0].run_directory, rollouts)
    finally:
        for broker in brokers:
            if broker.alive:
                await broker.kill()
        context.destroy(linger=0)
        await asyncio.to_thread(servers.__exit__, None, None, None)
    indices = [batch.index for batch, _ in learner.batches]
    return Outcome(
        kills=kills,
        acknowledged=acknowledged,
        lost=lost,
        sent_tokens=sum(chunk[2] for rollout in rollouts for chunk in rollout.chunks.values()),
        regenerated_tokens=regenerated(rollouts),
        failed_attempts=sum(broker.count("attempt_failed") for broker in brokers),
        batches=len(indices),
        batches_out_of_order=sum(index != place for place, index in enumerate(indices)),
    )


def _brokers(directory: Path, conninfo: str) -> list[BrokerProcess]:
    made: list[BrokerProcess] = []
    for name in ("first", "second"):
        folder = directory / name
        folder.mkdir()
        ends = {"work_endpoint": made[0].work_endpoint, "batch_endpoint": made[0].batch_endpoint} if made else {}
        settings = {"database": conninfo, "takeover_s": TAKEOVER_S, **ends}
        made.append(BrokerProcess(folder, {"broker": settings, "run": {"num_batches": 100_000}}))
    return made


async def _kill(brokers: list[BrokerProcess], nodes: Trio, rollouts: list[ScriptedRollout], kill_database: bool) -> Kill:
    """Kill both, wait until work goes on, and put everything back in its place. The leader comes first in ``brokers``."""
    await _some_work(rollouts, CHUNKS_BETWEEN)
    leader, standby = brokers
    before, dead = standby.count("broker_started"), nodes.primary
    clock = asyncio.get_running_loop().time
    began = clock()
    promoted: list[float] = []

    async def fail_over() -> None:
        if kill_database:
            await asyncio.to_thread(nodes.fail_over)
        promoted.append(clock() - began)

    if kill_database:
        await asyncio.gather(asyncio.to_thread(dead.kill), leader.kill())
    else:
        await leader.kill()
    known = sum(rollout.peer.num_acknowledged for rollout in rollouts)

    async def goes_on() -> float:
        await eventually(lambda: sum(rollout.peer.num_acknowledged for rollout in rollouts) > known, PATIENCE_S)
        return clock() - began

    async def serves() -> float:
        await eventually(lambda: standby.count("broker_started") > before, PATIENCE_S)
        return clock() - began

    served_s, went_on_s, _ = await asyncio.gather(serves(), goes_on(), fail_over())
    if kill_database:
        await asyncio.to_thread(nodes.rebuild, dead)
    waiting = leader.count("standby")
    await leader.launch()
    await eventually(lambda: leader.count("standby") > waiting, PATIENCE_S)
    brokers.reverse()
    return Kill(serves_s=served_s, goes_on_s=went_on_s, promoted_s=promoted[0])


async def _some_work(rollouts: list[ScriptedRollout], num_chunks: int) -> None:
    enough = sum(rollout.peer.num_acknowledged for rollout in rollouts) + num_chunks
    await eventually(lambda: sum(rollout.peer.num_acknowledged for rollout in rollouts) >= enough, PATIENCE_S)


def _spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.1f}, least {min(values):.1f}, most {max(values):.1f}"


def table(outcome: Outcome) -> str:
    """What is printed."""
    kills = outcome.kills
    rows: list[tuple[str, Callable[[], str]]] = [
        ("kills", lambda: str(len(kills))),
        ("seconds until another server takes commits", lambda: _spread([each.promoted_s for each in kills])),
        ("seconds until the standby broker serves", lambda: _spread([each.serves_s for each in kills])),
        ("seconds until a new chunk is acknowledged", lambda: _spread([each.goes_on_s for each in kills])),
        ("acknowledged chunks", lambda: f"{outcome.acknowledged:,}"),
        ("acknowledged chunks lost or changed", lambda: str(outcome.lost)),
        ("tokens sampled", lambda: f"{outcome.sent_tokens:,}"),
        ("tokens sampled again", lambda: f"{outcome.regenerated_tokens:,}"),
        ("failed attempts", lambda: str(outcome.failed_attempts)),
        ("batches trained, and out of order", lambda: f"{outcome.batches}, {outcome.batches_out_of_order}"),
    ]
    return "\n".join(f"| {name} | {text()} |" for name, text in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--keep-database", action="store_true", help="kill the broker alone")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(measure(Path(directory), arguments.kills, not arguments.keep_database))
    print(table(outcome))
    if arguments.json:
        about = {"machine": platform.platform(), "at": datetime.now(tz=UTC).isoformat()}
        arguments.json.write_text(json.dumps({**about, **asdict(outcome)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
