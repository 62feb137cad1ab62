"""A real broker is killed and its files are damaged: it says what is lost, ends with status 3, and writes over nothing."""

import asyncio
from pathlib import Path

import pytest
import zmq.asyncio

from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.cli.main import main
from gspo_services.runs.audit import audit_run
from gspo_services.shared.runtime.errors import EXIT_DAMAGED
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerDidNotStart, broker_process, eventually


async def test_a_broker_whose_log_is_damaged_names_what_is_lost_and_goes_on_when_that_is_accepted(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, run={"num_batches": 100}) as broker:
        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", chunk_delay_s=0.01)
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each.run()) for each in (rollout, learner)]
            await eventually(lambda: rollout.num_acknowledged > 10)
            # An orderly end merges the log: only what comes after it can be lost.
            assert await broker.terminate() == 0
            await broker.start()
            before = rollout.num_acknowledged
            await eventually(lambda: rollout.num_acknowledged > before + 10)
            await broker.kill()
            for task in running:
                task.cancel()
        log = broker.run_directory / f"{LEDGER_FILE}-wal"
        content = bytearray(log.read_bytes())
        content[17] ^= 1
        log.write_bytes(content)
        with pytest.raises(BrokerDidNotStart, match=r"chunks.*are lost.*the header of ledger.sqlite3-wal is damaged"):
            await broker.start()
        assert broker.returncode == EXIT_DAMAGED
        assert log.read_bytes() == content
        assert "acknowledged and missing" in audit_run(broker.run_directory).findings.counts
        assert await asyncio.to_thread(main, ["accept-loss", str(broker.run_directory)]) == 0
        await broker.start()
        assert await broker.terminate() == 0
    assert audit_run(broker.run_directory).findings.counts["lost, and accepted"] == 1
