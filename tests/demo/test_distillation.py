"""Whole runs with dense credit: of a teacher, a real SGLang server that goes away, and of turns. ``make test-demo``."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gspo_services.broker.store import reading
from gspo_services.rollout.sglang import server_process as server_module
from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions, server_command
from tests.support.broker.ledger_audit import audit
from tests.support.processes.ports import free_ports
from tests.support.processes.run_process import REPOSITORY, RunProcess
from tests.support.runs.multi_turn import multi_turn_run
from tests.support.runs.replayed import assert_replayed_whole

pytestmark = [pytest.mark.demo, pytest.mark.timeout(3600)]
NUM_BATCHES = 12
SMALL = (
    f"run.num_batches={NUM_BATCHES}", "batch.group_size=4", "batch.groups_per_batch=16", "rollout.num_servers=1",
    "rollout.max_running=64", "rollout.max_total_tokens=4096", "evaluation.every_batches=0",
    "learner.checkpoint_every_batches=4", f"model.path={REPOSITORY / 'models' / 'tiny'}",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, twice as sure of every token."""
    directory = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(REPOSITORY / "models" / "tiny", directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= 2
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@asynccontextmanager
async def serving(model: Path, port: int, log_path: Path) -> AsyncIterator[EngineServer]:
    """As a user starts one: a rollout starts its own without a tokenizer."""

    def command(options: ServerOptions, *, port: int, cuda: bool) -> list[str]:
        return [word for word in server_command(options, port=port, cuda=cuda) if word != "--skip-tokenizer-init"]

    options = ServerOptions(model_path=model, log_path=log_path, port=port, max_total_tokens=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "server_command", command)
        async with EngineServer(options) as server:
            yield server


async def test_a_served_teacher_may_go_away_and_come_back_and_a_replay_needs_none(teacher: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    log_path = tmp_path / "teacher.log"
    directory = tmp_path / "run"
    given = (*SMALL, f"distillation.teacher=http://127.0.0.1:{port}", "distillation.only=true")
    async with serving(teacher, port, log_path) as served:
        with RunProcess(REPOSITORY / "examples/arithmetic.toml", directory, *given) as run:
            await asyncio.to_thread(run.wait_until, "3 batches", lambda: len(run.rows("batch")) >= 3, 1200)
            await served.stop()

            def gone() -> bool:
                return any("the teacher at" in each["error"] for each in run.events("learner", "stopped_by_error"))

            await asyncio.to_thread(run.wait_until, "a learner without its teacher", gone, 300)
            async with serving(teacher, port, log_path):
                await asyncio.to_thread(run.wait_until, "6 batches", lambda: len(run.rows("batch")) >= 6, 1200)
                run.kill("gspo_services.learner")
                assert await asyncio.to_thread(run.wait_finished, 1800) == 0, run.tail()
            trained = {(line["batch"], line["teacher_kl/all"]) for line in run.rows("batch")}
    assert audit(directory).problems == []
    assert len(trained) == NUM_BATCHES, "a batch that was trained again had the same numbers"
    assert run.rows("quarantined") == []
    await asyncio.to_thread(assert_replayed_whole, directory, NUM_BATCHES)


def test_rewards_by_turn_beside_a_teacher_survive_the_end_of_each_process(teacher: Path, tmp_path: Path) -> None:
    given = (
        *SMALL, f"distillation.teacher={teacher}", "objective.advantage=turn", "objective.normalise_by_std=false",
        "environment.options.call_reward=0.25",
    )  # fmt: skip
    with multi_turn_run(tmp_path, *given) as run:
        run.kill_each(every_batches=2)
        assert run.wait_finished(900) == 0, run.tail()
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_batches == NUM_BATCHES
    with reading(tmp_path) as connection:
        rewards = [json.loads(row[0]) for row in connection.execute("SELECT turn_rewards FROM trajectories")]
    assert [0.25, 1.0] in rewards, "a call was paid, and then the answer"
    assert [0.25, 0.0] in rewards, "or not the answer"
    # An estimate from sampled tokens: in one batch it may be below 0.
    assert all(row["teacher_kl/all"] != 0 for row in run.rows("batch"))
    assert_replayed_whole(tmp_path, NUM_BATCHES)
