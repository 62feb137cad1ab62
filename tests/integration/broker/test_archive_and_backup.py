"""A real broker archives while it works and is killed meanwhile; it is copied while it goes on, restored, and continues."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import zmq.asyncio

from gspo_protocol.messages import Checkpointed, Resume, Trained
from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup import back_up, list_backups, restore
from tests.support.broker.batch_rows import RUN_TIMEOUT_S, rows_of_batches
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout, running
from tests.support.broker.process import BrokerProcess, broker_process, eventually
from tests.support.processes.small_run import write_checkpoint

NUM_BATCHES = 8
SETTINGS = {"run": {"num_batches": NUM_BATCHES}, "broker": {"keep_batches": 1, "archive_file_mib": 0.0005}}


class SavingLearner(ScriptedLearner):
    """A learner that leaves checkpoints, and resumes as the real one does."""

    run_directory: Path

    async def run(self) -> None:
        async with running(self.peer):
            welcome = await self.peer.connected_welcome()
            version, trained, index = welcome.policy_version, welcome.trained_batches, self.resume_at
            await self.peer.send(Resume(next_batch=index))
            if not version:
                version = 1
                await self._publish(version, index)
            while await self._batch(index, version if index >= trained else 0) is not None:
                await asyncio.sleep(self.train_s)
                index += 1
                if index >= trained:
                    version += index > trained
                    await self._publish(version, index)
                made = version if index >= trained else 0
                await self.peer.send(Trained(index=index - 1, policy_version=made, metrics={"loss": 0.5}))
                if index % self.checkpoint_every == 0:
                    write_checkpoint(self.run_directory, made, index)
                    await self.peer.send(Checkpointed(next_batch=index, policy_version=made))
            await self.peer.flushed()


@asynccontextmanager
async def peers_of(
    broker: BrokerProcess, context: zmq.asyncio.Context, session: str, resume_at: int
) -> AsyncIterator[SavingLearner]:
    """Two rollouts and a learner that work until the run is over."""
    learner = SavingLearner(context, broker.batch_endpoint, session, resume_at=resume_at, train_s=0.05)
    learner.run_directory = broker.run_directory
    async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        for name in ("r0", "r1"):
            rollout = ScriptedRollout(context, broker.work_endpoint, name, session, action_tokens=37, chunk_delay_s=0.005)
            tasks.create_task(rollout.run())
        tasks.create_task(learner.run())
        yield learner


async def test_a_broker_is_killed_while_it_archives_and_copied_while_it_works_and_its_copies_continue(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    backups = tmp_path / "backups"
    async with broker_process(tmp_path, **SETTINGS) as broker:
        async with peers_of(broker, context, "first", 0):
            for enough in (1, 2):
                await eventually(lambda: broker.count("archived") >= enough)  # noqa: B023
                await asyncio.to_thread(back_up, broker.run_directory, backups, lambda _: None)
                await broker.kill()
                await broker.start()
        # The last life of the broker archives as well; a quick run is over before it does.
        await eventually(lambda: broker.count("archived") > 2)
        assert await broker.terminate() == 0
        assert broker.count("archive_not_written") == 0
        rows_of_batches(broker, NUM_BATCHES)
    audit = audit_run(broker.run_directory)
    assert audit.problems == []
    assert audit.num_batches == NUM_BATCHES

    made = list_backups(backups)
    assert len(made) == 2
    first = made[0][1].positions[-1]
    for number, batch in ((0, None), (1, first)):
        directory = tmp_path / f"restored-{number}"
        directory.mkdir()
        restore(backups, directory / "run", batch, lambda _: None)
        assert audit_run(directory / "run").problems == []
        resume_at = first if batch is not None else made[-1][1].positions[-1]
        async with broker_process(directory, **SETTINGS) as again:
            async with peers_of(again, context, f"again-{number}", resume_at) as learner:
                pass
            assert await again.terminate() == 0
            assert again.last("broker_started")["run_id"] != broker.last("broker_started")["run_id"]
            rows_of_batches(again, NUM_BATCHES)
        assert learner.end is not None
        audit = audit_run(directory / "run")
        assert (audit.problems, audit.num_batches) == ([], NUM_BATCHES)
