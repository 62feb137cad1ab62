"""A broker whose database waits for replicas that lag, are paused, or are promoted meanwhile: real servers and processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import zmq.asyncio

from benchmarks.standby.load import missing
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, eventually
from tests.support.postgres.server import PostgresServer, programs
from tests.support.postgres.trio import trio
from tests.support.wire.zmq_ends import zmq_context

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed: apt-get install postgresql"),
]
PATIENCE_S = 120.0


def receivers(replicas: list[PostgresServer], number: signal.Signals) -> None:
    """Suspend, or continue, what takes the primary's log: from now on it is as late as the suspension is long."""
    for replica in replicas:
        for (pid,) in replica.sql("SELECT pid FROM pg_stat_wal_receiver"):
            os.kill(pid, number)


class Watched:
    """A broker at work."""

    def __init__(self, broker: BrokerProcess, rollouts: list[ScriptedRollout]) -> None:
        self.broker = broker
        self.rollouts = rollouts

    @property
    def num_acknowledged(self) -> int:
        return sum(rollout.peer.num_acknowledged for rollout in self.rollouts)

    async def goes_on(self) -> None:
        """Wait until it acknowledges more."""
        enough = self.num_acknowledged + 20
        await eventually(lambda: self.num_acknowledged >= enough, PATIENCE_S)
        assert self.broker.alive

    async def waits(self, text: str) -> None:
        """Wait until it acknowledges nothing any more, and says that it waits for a replica."""
        failed = self.broker.count("commit_failed")
        await eventually(lambda: self.broker.count("commit_failed") > failed, PATIENCE_S)
        before = self.num_acknowledged
        await eventually(lambda: self.broker.count("commit_failed") > failed + 1, PATIENCE_S)
        assert self.num_acknowledged == before
        status, said = await self.broker.http("/readyz")
        assert (status, text in said) == (503, True), said
        assert self.broker.alive


async def test_a_broker_waits_for_replicas_that_lag_and_loses_nothing_to_the_one_that_is_promoted(
    tmp_path: Path,
) -> None:
    async with zmq_context() as context:
        await _played(tmp_path, context)


async def _played(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    with trio() as database:
        replicas = database.nodes[1:]
        broker = BrokerProcess(tmp_path, {"broker": {"database": database.conninfo}, "run": {"num_batches": 100_000}})
        ends = (broker.work_endpoint, broker.batch_endpoint)
        rollouts = [
            ScriptedRollout(context, ends[0], f"r{index}", "s", action_tokens=160, chunk_delay_s=0.03) for index in range(2)
        ]
        learner = ScriptedLearner(context, ends[1], "s", train_s=0.2)
        watched = Watched(broker, rollouts)
        try:
            await broker.start()
            async with asyncio.TaskGroup() as tasks:
                working = [tasks.create_task(each.run()) for each in (*rollouts, learner)]
                await watched.goes_on()

                # What a replica has on its disk counts, however late it applies it...
                for replica in replicas:
                    replica.sql("SELECT pg_wal_replay_pause()")
                await watched.goes_on()
                # ...unless the database is told to wait for that, too.
                database.primary.setting("synchronous_commit", "remote_apply")
                await watched.waits("standby")
                for replica in replicas:
                    replica.sql("SELECT pg_wal_replay_resume()")
                await watched.goes_on()
                database.primary.reset("synchronous_commit")

                receivers(replicas, signal.SIGSTOP)
                await watched.waits("standby")
                receivers(replicas, signal.SIGCONT)
                await watched.goes_on()

                # The primary has commits that no replica has when it dies, and the replica that is promoted applies late.
                for replica in replicas:
                    replica.sql("SELECT pg_wal_replay_pause()")
                receivers(replicas, signal.SIGSTOP)
                await watched.waits("standby")
                await asyncio.to_thread(database.primary.kill)
                receivers(replicas, signal.SIGCONT)
                await asyncio.to_thread(database.fail_over)
                # A replica that is paused does not follow another primary either.
                (other,) = (replica for replica in replicas if replica is not database.primary)
                other.sql("SELECT pg_wal_replay_resume()")
                await watched.goes_on()

                for task in working:
                    task.cancel()
            assert await broker.terminate() == 0
        finally:
            if broker.alive:
                await broker.kill()
        acknowledged, lost = missing(broker.run_directory, rollouts)
    assert (acknowledged > 100, lost) == (True, 0)
    assert (broker.count("broker_started"), broker.count("attempt_failed")) == (1, 0)
