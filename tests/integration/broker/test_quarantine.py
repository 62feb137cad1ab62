"""A batch that ends its learners is quarantined by a real broker, and an operator requeues it."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import zmq.asyncio

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.runs.audit import audit_run
from tests.support.broker.commands import ALONE, command
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, broker_process, scraped
from tests.support.wire.zmq_ends import in_background

RUN_TIMEOUT_S = 240.0


def require_clean(broker: BrokerProcess) -> None:
    assert audit_run(broker.run_directory).problems == []


async def test_a_batch_that_two_learners_cannot_train_is_skipped_and_requeued(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, batch={"max_lag": 4}, **ALONE) as broker, asyncio.timeout(RUN_TIMEOUT_S):
        rollout = ScriptedRollout(context, broker.work_endpoint, "rollout-0", "a")
        async with in_background(rollout.run()):
            for session in ("first", "second"):
                await ScriptedLearner(context, broker.batch_endpoint, session, poison=frozenset({1})).run()
                await broker.kill()
                await broker.start()
            third = ScriptedLearner(context, broker.batch_endpoint, "third", stop_after=lambda index: index == 2)
            await third.run()
            assert [skipped.index for skipped in third.skipped] == [1]
            assert "2 learners could not train it: the loss is nan" in third.skipped[0].reason
            status, said = await command("doctor", str(broker.run_directory))
            assert status == 1
            assert "batch 1 (2 groups) was quarantined at version" in said
            assert f"`gspo requeue {broker.run_directory} all` requeues them" in said
            status, said = await command("requeue", str(broker.run_directory), "0")
            assert (status, "0 is not a quarantined batch; quarantined are: 1" in said) == (2, True)
            status, said = await command("requeue", str(broker.run_directory), "all")
            assert (status, "batch 1 is requeued" in said) == (0, True), said
            last = ScriptedLearner(context, broker.batch_endpoint, "last", resume_at=2)
            await last.run()
        assert last.end is not None
        assert last.end.reason == "all 4 batches are trained"
        taken_back = broker.count("group_taken_back")
        assert await broker.terminate() == 0
    require_clean(broker)
    with closing(sqlite3.connect(broker.run_directory / LEDGER_FILE)) as ledger:
        again = ledger.execute("SELECT count(*) FROM groups WHERE replaces IS NOT NULL").fetchone()[0]
        back = ledger.execute(
            "SELECT count(*) FROM batches, json_each(group_ids) WHERE value IN "
            "(SELECT value FROM batches, json_each(group_ids) WHERE batch = 1)"
        ).fetchone()[0]
    assert taken_back + again <= 2
    assert back == 2 + taken_back


async def test_a_batch_that_cannot_be_read_is_quarantined_and_the_run_goes_on(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, **ALONE) as broker, asyncio.timeout(RUN_TIMEOUT_S):
        rollout = ScriptedRollout(context, broker.work_endpoint, "rollout-0", "a")
        async with in_background(rollout.run()):
            await ScriptedLearner(context, broker.batch_endpoint, "first", poison=frozenset({0})).run()
            await broker.kill()
            with closing(sqlite3.connect(broker.run_directory / LEDGER_FILE)) as ledger, ledger:
                in_batch = "SELECT group_id FROM groups WHERE batch = 0"
                first = f"(SELECT min(trajectory_id) FROM trajectories WHERE group_id IN ({in_batch}))"
                ledger.execute(f"UPDATE chunks SET token_ids = zeroblob(length(token_ids)) WHERE trajectory_id = {first}")
            await broker.start()
            learner = ScriptedLearner(context, broker.batch_endpoint, "second")
            await learner.run()
        assert [skipped.index for skipped in learner.skipped] == [0]
        assert "it cannot be delivered: StoreCorrupt" in learner.skipped[0].reason
        assert learner.end is not None
        await scraped(broker, "gspo_broker_quarantined_batches_total 1.0", 'gspo_broker_groups{state="quarantined"} 2.0')
        assert await broker.terminate() == 0
    status, said = await command("requeue", str(broker.run_directory))
    assert status == 0
    assert "batch 0: 2 groups quarantined (at version" in said
    assert "changed on the disk" in said
    status, said = await command("requeue", str(broker.run_directory), "all")
    assert (status, "no broker is running" in said) == (0, True), said
    status, said = await command("requeue", str(broker.run_directory))
    assert (status, "batch 0: requeued, 2 groups wait for room" in said) == (0, True), said
    names = set(audit_run(broker.run_directory).findings.counts)
    assert names == {"chunk was changed"}
