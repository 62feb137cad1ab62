"""Two broker processes and a real PostgreSQL: the standby takes over, and nothing acknowledged is lost."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.asyncio

from gspo_services.broker.store import LEDGER_FILE, Reader, reading
from tests.support.broker.peers import PROMPT_TOKENS, ScriptedLearner, ScriptedRollout, logprobs_of, tokens_of
from tests.support.broker.process import BrokerDidNotStart, BrokerProcess, eventually, scraped
from tests.support.postgres.fixtures import SynchronousDatabase

RUN_TIMEOUT_S = 120.0
TAKEOVER_S = 2.0
SOON_S = 15.0
"""Enough on a busy machine."""


@contextlib.asynccontextmanager
async def pair_of_brokers(
    directory: Path,
    conninfo: str,
    schema: str,
    num_batches: int = 8,
    *,
    own_addresses: bool = False,
    takeover_s: float = TAKEOVER_S,
) -> AsyncIterator[tuple[BrokerProcess, BrokerProcess]]:
    """A leader that serves, and a standby that waits for the same endpoints, or has its own."""
    settings = {"database": conninfo, "database_schema": schema, "takeover_s": takeover_s}
    made: list[BrokerProcess] = []
    for name in ("first", "second"):
        folder = directory / name
        folder.mkdir()
        ends = {}
        if made and not own_addresses:
            ends = {"work_endpoint": made[0].work_endpoint, "batch_endpoint": made[0].batch_endpoint}
        made.append(BrokerProcess(folder, {"broker": {**settings, **ends}, "run": {"num_batches": num_batches}}))
    try:
        await made[0].start()
        await made[1].launch()
        await made[1].logged("standby")
        yield made[0], made[1]
    finally:
        for broker in made:
            if broker.alive:
                await broker.kill()


async def test_kill_9_of_the_leader_in_mid_stream_and_the_standby_goes_on_without_losing_anything_acknowledged(
    tmp_path: Path, context: zmq.asyncio.Context, postgres: SynchronousDatabase, schema: str
) -> None:
    async with pair_of_brokers(tmp_path, postgres.conninfo, schema, 5) as (first, second):
        rollouts = [
            ScriptedRollout(context, first.work_endpoint, f"r{index}", "s", action_tokens=37, chunk_delay_s=0.02)
            for index in range(2)
        ]
        learner = ScriptedLearner(context, first.batch_endpoint, "s", train_s=0.05)
        loop = asyncio.get_running_loop()
        took_s = 0.0

        async def kill() -> None:
            nonlocal took_s
            await eventually(lambda: sum(len(rollout.chunks) for rollout in rollouts) > 100)
            await eventually(lambda: any(rollout.episodes_under_way for rollout in rollouts))
            await first.kill()
            began = loop.time()
            await second.serves()
            took_s = loop.time() - began

        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            for rollout in rollouts:
                tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
        assert second.last("leadership_taken")["silent_s"] >= TAKEOVER_S
        assert took_s < TAKEOVER_S + SOON_S
        assert [batch.index for batch, _ in learner.batches] == list(range(5))
        assert second.count("attempt_failed") == 0, "a lost chunk leaves a gap, and a gap is a failed attempt"
        assert await second.terminate() == 0
    with reading(second.run_directory) as connection:
        ledger = Reader(second.run_directory / LEDGER_FILE, connection)
        rows = [row for index in range(5) for row, _ in ledger.batch(index)[1]]
        for row in rows:
            payload = ledger.payload(row.trajectory_id)
            assert payload.token_ids.tolist() == tokens_of(row.trajectory_id, PROMPT_TOKENS + 37).tolist()
            assert payload.logprobs.tolist() == logprobs_of(row.trajectory_id, PROMPT_TOKENS + 37).tolist()
    assert len({row.trajectory_id for row in rows}) == len(rows) == 5 * 4


async def test_a_leader_that_ends_in_order_gives_its_place_up_at_once_and_comes_back_as_the_standby(
    tmp_path: Path, postgres: SynchronousDatabase, schema: str
) -> None:
    async with pair_of_brokers(tmp_path, postgres.conninfo, schema, takeover_s=4 * SOON_S) as (first, second):
        loop = asyncio.get_running_loop()
        assert (await first.http("/readyz"))[0] == 200
        assert await first.terminate() == 0
        began = loop.time()
        await second.logged("leadership_taken")
        assert loop.time() - began < SOON_S
        assert second.last("leadership_taken")["silent_s"] < SOON_S
        await second.serves()
        await scraped(second, "gspo_broker_leads 1.0")
        await first.launch()
        await eventually(lambda: first.count("standby") == 1)
        assert await first.terminate() == 0
        assert await second.terminate() == 0


async def test_a_standby_says_whose_it_is_and_is_alive_and_not_ready_and_nobody_says_the_password(
    tmp_path: Path, postgres: SynchronousDatabase, schema: str
) -> None:
    async with pair_of_brokers(tmp_path, f"{postgres.conninfo} password=hunter2", schema) as (first, second):
        second.metrics_port = second.last("waiting_to_lead")["metrics_port"]
        holder = second.last("standby")["leader"]
        assert f":{first.pid} " in holder
        assert await second.http("/readyz") == (503, f"standby of {holder}\n")
        assert (await second.http("/healthz"))[0] == 200
        assert (await second.http("/startupz"))[0] == 200
        await scraped(first, "gspo_broker_leads 1.0", "gspo_broker_leader_silent_seconds 0.0")
        await scraped(second, "gspo_broker_leads 0.0", "gspo_broker_standby_commits_behind 0.0")
        written = [path.read_bytes() for path in first.run_directory.rglob("*") if path.is_file()]
        assert any(b'"database": "**********"' in each for each in written), "settings.json"
        assert not any(b"hunter2" in each for each in written)
        assert "hunter2" not in str(first.events + second.events)


async def test_a_leader_that_was_suspended_writes_nothing_more_and_ends_while_its_peers_are_at_the_other_address(
    tmp_path: Path, context: zmq.asyncio.Context, postgres: SynchronousDatabase, schema: str
) -> None:
    async with pair_of_brokers(tmp_path, postgres.conninfo, schema, 4, own_addresses=True) as (first, second):
        works, batches = f"{first.work_endpoint},{second.work_endpoint}", f"{first.batch_endpoint},{second.batch_endpoint}"
        rollout = ScriptedRollout(context, works, "r", "s", action_tokens=37, chunk_delay_s=0.02)
        learner = ScriptedLearner(context, batches, "s", train_s=0.05)

        async def suspend() -> None:
            await eventually(lambda: len(rollout.chunks) > 40)
            os.kill(first.pid, signal.SIGSTOP)
            await second.serves()
            await eventually(lambda: rollout.peer.endpoint == second.work_endpoint and rollout.peer.connected)
            os.kill(first.pid, signal.SIGCONT)

        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(suspend())
            tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
        await eventually(lambda: first.returncode is not None)
        assert first.returncode == 1
        assert (
            "and this broker had epoch 1: nothing of what it had not acknowledged" in first.last("stopped_by_error")["error"]
        )
        assert [batch.index for batch, _ in learner.batches] == list(range(4))
        assert second.count("attempt_failed") == 0
        assert await second.terminate() == 0


async def test_a_database_that_waits_for_nobody_is_refused_with_the_way_out(
    tmp_path: Path, postgres: SynchronousDatabase, schema: str
) -> None:
    broker = BrokerProcess(tmp_path, {"broker": {"database": postgres.conninfo, "database_schema": schema}})
    postgres.server.setting("synchronous_standby_names", "")
    try:
        with pytest.raises(BrokerDidNotStart, match=r"its synchronous_standby_names is empty: .* Set synchronous_standby_n"):
            await broker.start()
    finally:
        postgres.server.setting("synchronous_standby_names", "*")
    assert broker.returncode == 2
