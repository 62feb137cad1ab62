"""Disks are full or cannot be written: the broker acknowledges nothing, the learner keeps its last checkpoint."""

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq.asyncio

from gspo_services.learner.checkpoints.format import (
    CheckpointError,
    CheckpointState,
    load_checkpoint,
)
from gspo_services.learner.checkpoints.versions import Versions
from gspo_services.shared.runtime.errors import EXIT_NO_ROOM
from tests.faults.fleet import Fleet
from tests.support.broker.ledger_audit import audit
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerDidNotStart, BrokerProcess, broker_process
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.checkpoints import find_latest, newest_given
from tests.support.learner.saving import save_checkpoint
from tests.support.processes.small_disk import small_disk
from tests.support.wire.zmq_ends import a_welcome, zmq_context

RUN_S = 60.0
NUM_BATCHES = 6
MIB = 2**20


async def run_with_a_fault(
    broker: BrokerProcess, context: zmq.asyncio.Context, refuse: Callable[[], None], allow: Callable[[], None]
) -> None:
    """A whole run; after two batches the disk refuses for a while."""
    rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", chunk_delay_s=0.01)
    learner = ScriptedLearner(context, broker.batch_endpoint, "s")

    async def refuse_for_a_while() -> None:
        await broker.logged("batch_trained", 2)
        refuse()
        await broker.logged("commit_failed", 3)
        status, reason = await broker.http("/readyz")
        assert (status, "ledger.sqlite3: cannot be written" in reason) == (503, True), reason
        assert (await broker.http("/healthz"))[0] == 200
        acknowledged = rollout.num_acknowledged
        await broker.logged("commit_failed", 4)
        assert rollout.num_acknowledged == acknowledged, "acknowledged without a commit"
        allow()

    async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(rollout.run())
        tasks.create_task(learner.run())
        tasks.create_task(refuse_for_a_while())
    assert [batch.index for batch, _ in learner.batches] == list(range(NUM_BATCHES))
    assert await broker.http("/readyz") == (200, "ready\n")
    assert await broker.terminate() == 0
    assert broker.count("lease_expired") == 0
    assert_clean(broker.run_directory)


def assert_clean(directory: Path) -> None:
    report = audit(directory)
    assert report.problems == []
    assert (report.num_batches, report.dropped, report.num_trained_again) == (NUM_BATCHES, {}, 0)


async def test_a_broker_on_a_full_disk_acknowledges_nothing_until_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", 8 * MIB) as disk:
        async with zmq_context() as context, broker_process(tmp_path, run={"num_batches": NUM_BATCHES}) as broker:
            await run_with_a_fault(broker, context, disk.fill, disk.empty)
        assert "free space on its disk" in broker.last("commit_failed")["error"]


async def test_a_broker_with_write_protected_files_acknowledges_nothing_until_they_are_writable(tmp_path: Path) -> None:
    files = [tmp_path / "run" / name for name in ("ledger.sqlite3", "ledger.sqlite3-wal")]

    def protect(sign: str) -> bool:
        command = ["chattr", f"{sign}i", *map(str, files)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    async with zmq_context() as context, broker_process(tmp_path, run={"num_batches": NUM_BATCHES}) as broker:
        if shutil.which("chattr") is None or not protect("+"):
            pytest.skip("the file system has no immutable files")
        protect("-")
        try:
            await run_with_a_fault(broker, context, lambda: assert_true(protect("+")), lambda: assert_true(protect("-")))
        finally:
            protect("-")


async def test_a_broker_that_starts_on_a_full_disk_says_so_with_its_own_status_and_starts_once_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "run", 8 * MIB) as disk:
        async with broker_process(tmp_path, run={"num_batches": NUM_BATCHES}) as broker:
            await broker.kill()
            disk.fill()
            with pytest.raises(BrokerDidNotStart, match="No space left on device"):
                await broker.start()
            assert broker.returncode == EXIT_NO_ROOM
            # A new run begins where nothing is left of one.
            for path in disk.path.iterdir():
                path.unlink()
            disk.fill()
            with pytest.raises(BrokerDidNotStart, match="database or disk is full; free space on its disk"):
                await broker.start()
            assert broker.returncode == EXIT_NO_ROOM
            disk.empty()
            await broker.start()
            assert await broker.terminate() == 0


def assert_true(value: bool) -> None:
    assert value


@pytest.mark.faults
async def test_a_broker_on_a_read_only_disk_says_so_and_continues_when_it_is_writable_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", 8 * MIB) as disk:
        async with zmq_context() as context, broker_process(tmp_path, run={"num_batches": NUM_BATCHES}) as broker:
            rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", chunk_delay_s=0.01)
            learner = ScriptedLearner(context, broker.batch_endpoint, "s")

            async def read_only_for_a_while() -> None:
                await broker.logged("batch_trained", 2)
                await broker.kill()
                disk.set_writable(False)
                with pytest.raises(BrokerDidNotStart, match="Read-only file system"):
                    await broker.start()
                disk.set_writable(True)
                await broker.start()

            async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(rollout.run())
                tasks.create_task(learner.run())
                tasks.create_task(read_only_for_a_while())
            assert [batch.index for batch, _ in learner.batches] == list(range(NUM_BATCHES))
            assert await broker.terminate() == 0
        assert_clean(broker.run_directory)


def state(version: int) -> CheckpointState:
    return CheckpointState(policy_version=version, batch_position=version, mismatch={})


class TorchBigram(BigramEngine):
    """An engine that saves with torch's own writer, as DeepSpeed does."""

    def save_state(self, directory: Path) -> list[Path]:
        directory.mkdir()
        torch.save({"table": self.table.detach()}, directory / "table.pt")
        return [directory / "table.pt"]

    def load_state(self, directory: Path) -> None:
        self.table = torch.load(directory / "table.pt", weights_only=True)["table"].requires_grad_()


def test_a_checkpoint_without_room_gives_an_error_that_says_so_and_the_last_one_stays(tmp_path: Path) -> None:
    engine = TorchBigram(vocab_size=256)  # 256 KiB
    with small_disk(tmp_path / "checkpoints", 4 * MIB) as disk:
        saved = save_checkpoint(engine, disk.path, state(1), keep=2)
        digest = engine.weights_digest()
        engine.table = (engine.table.detach() + 1).requires_grad_()
        for room in (0, 4096 * 4, MIB // 4):  # room for nothing, for the directories, for nearly everything
            disk.fill(room)
            with pytest.raises(CheckpointError, match=r"cannot be written: .* make room") as caught:
                save_checkpoint(engine, disk.path, state(2), keep=2)
            assert "0 MiB are free there" in str(caught.value)
            assert find_latest(disk.path) == saved
            assert [path.name for path in disk.path.iterdir() if path.name.startswith(".")] == []
            disk.empty()
        fresh = TorchBigram(vocab_size=256, seed=1)
        assert load_checkpoint(fresh, saved).policy_version == 1
        assert fresh.weights_digest() == digest
        assert find_latest(disk.path) == saved
        assert save_checkpoint(engine, disk.path, state(2), keep=2) == find_latest(disk.path)


def test_a_version_that_cannot_be_reserved_gives_an_error_and_the_last_one_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "checkpoints", MIB) as disk:
        versions = Versions(disk.path, "learner")
        versions.begin(a_welcome(policy_version=6))
        versions.reserve(7, 0)
        disk.fill()
        with pytest.raises(CheckpointError, match=r"last-version cannot be written: .*No space left"):
            versions.reserve(8, 1)
        assert newest_given(disk.path) == 7
        disk.empty()
        versions.reserve(9, 1)
        assert newest_given(disk.path) == 9


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_learner_without_room_for_a_checkpoint_ends_with_the_reason_and_resumes_from_the_last(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "learner.checkpoint_every_batches=2")
    with small_disk(tmp_path / "checkpoints", 64 * MIB) as disk, fleet:
        fleet.start("broker")
        fleet.start("rollout", name="rollout-0")
        learner = fleet.start("learner")
        fleet.wait_until("a checkpoint", lambda: bool(fleet.events("learner", "checkpoint_saved")))
        disk.fill(MIB)
        fleet.wait_until("an end", lambda: learner.ends == [EXIT_NO_ROOM])
        (ended,) = fleet.events("learner", "no_room")
        assert "cannot be written" in ended["error"]
        assert "make room" in ended["error"]
        saved = fleet.events("learner", "checkpoint_saved")[-1]
        disk.empty()
        fleet.finish()
        assert fleet.events("learner", "resumed")[-1]["next_batch"] == saved["next_batch"]
        report = audit(tmp_path)
    assert report.problems == []
    # Those since the last checkpoint, and those trained while the next one was being written.
    assert 1 <= report.num_trained_again <= 4
