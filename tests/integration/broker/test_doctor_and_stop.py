"""``gspo doctor`` and ``gspo stop`` against a real broker, as a person calls them."""

import asyncio
import socket
from pathlib import Path

from gspo_services.runs.backup import back_up, restore
from tests.support.broker.commands import ALONE, command
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import broker_process
from tests.support.runs.backups import identity, nothing
from tests.support.wire.zmq_ends import in_background, zmq_context


async def test_the_doctor_names_the_missing_processes_and_then_that_the_broker_is_gone(tmp_path: Path) -> None:
    async with broker_process(tmp_path, **ALONE) as broker:
        status, said = await command("doctor", str(broker.run_directory))
        assert status == 1
        assert "no learner is connected" in said
        assert "no rollout is connected" in said
        assert "batch 0 of 4 waits for the learner to publish its first weights" in said
        # Asked for by its configuration file, which belongs to another run: this one must not be described.
        status, said = await command("doctor", str(broker.config), "--set", "run.seed=7")
        assert status == 1
        assert "the broker turns this command away" in said
        assert "this broker's run has other settings" in said
    status, said = await command("doctor", str(broker.run_directory))
    assert status == 1
    assert "the broker is not running. 0 of 4 batches are trained" in said


async def test_a_restored_run_that_does_not_go_on_is_not_taken_for_the_one_that_does(tmp_path: Path) -> None:
    async with broker_process(tmp_path, **ALONE) as broker:
        back_up(broker.run_directory, tmp_path / "backups", nothing)
        restore(tmp_path / "backups", tmp_path / "restored", None, nothing)
        status, said = await command("stop", str(tmp_path / "restored"))
        assert status == 1
        assert f"run {identity(broker.run_directory)} answers" in said
        assert f"has run {identity(tmp_path / 'restored')}: it was restored or begun anew" in said
        # Moved, it is itself.
        broker.run_directory.rename(tmp_path / "moved")
        status, said = await command("stop", str(tmp_path / "moved"))
        assert status == 0, said


async def test_a_run_that_is_told_to_stop_ends_with_the_current_batch(tmp_path: Path) -> None:
    async with broker_process(tmp_path, run={"num_batches": 1000}, **ALONE) as broker, zmq_context() as context:
        rollout = ScriptedRollout(context, broker.work_endpoint, "rollout-0", "a")
        learner = ScriptedLearner(context, broker.batch_endpoint, "a")
        async with in_background(rollout.run()):
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(learner.run())
                await broker.logged("batch_trained", 3)
                status, said = await command("stop", str(broker.run_directory), "--reason", "enough for today")
                assert status == 0, said
                assert "enough for today" in said or "the run has ended" in said
                async with asyncio.timeout(60):
                    await training
        assert 3 <= broker.count("batch_trained") < 1000
        status, said = await command("doctor", str(broker.run_directory))
        assert status == 0, said
        assert "the run has ended after" in said
        assert "enough for today" in said


async def test_without_a_broker_stop_says_so(tmp_path: Path) -> None:
    """Whether nobody listens there or something that is no broker: both at once, because each waits for 15 s."""
    brokers = []
    for name in ("nobody", "somebody"):
        (tmp_path / name).mkdir()
        async with broker_process(tmp_path / name, **ALONE) as broker:
            brokers.append(broker)
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", int(brokers[1].batch_endpoint.rpartition(":")[2])))
        somebody.listen()
        answers = await asyncio.gather(*(command("stop", str(broker.run_directory)) for broker in brokers))
    for broker, (status, said) in zip(brokers, answers, strict=True):
        assert status == 1
        assert f"{broker.batch_endpoint}: no answer within 15 s" in said
        assert "gspo doctor" in said


async def test_a_directory_without_settings_is_no_run(tmp_path: Path) -> None:
    for name in ("doctor", "stop"):
        status, said = await command(name, str(tmp_path))
        assert status == 2
        assert "settings.json: missing" in said
