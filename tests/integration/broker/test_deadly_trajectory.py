"""Real processes: a trajectory that kills every rollout is given up, and the run goes on without it."""

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

import zmq.asyncio

from gspo_services.broker.ledger import trajectory_seed
from tests.support.broker.ledger_audit import audit
from tests.support.broker.peers import ScriptedLearner
from tests.support.broker.process import broker_process
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model

DEADLY = 2
NUM_BATCHES = 6
RUN_SEED = 0


class Rollouts:
    """Processes that are started again whenever they die, as by a supervisor."""

    def __init__(self, endpoint: str, model: Path, deadly_seed: int) -> None:
        self._arguments = (endpoint, str(deadly_seed), str(model))
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self.deaths: Counter[str] = Counter()

    async def keep(self, name: str) -> None:
        endpoint, seed, model = self._arguments
        while True:
            process = self._processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.support.processes.deadly_rollout", endpoint, name, seed, model, "4"
            )
            status = await process.wait()
            if status == 0:
                return
            assert status == -signal.SIGKILL, "nothing but the kill ends it"
            self.deaths[name] += 1

    def end(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()


async def test_a_trajectory_that_kills_every_rollout_is_given_up_and_reported(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    model = save_chat_model(tmp_path / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
    run = {"num_batches": NUM_BATCHES, "seed": RUN_SEED}
    async with broker_process(tmp_path, run=run, broker={"lease_s": 2.0}) as broker, asyncio.timeout(240):
        rollouts = Rollouts(broker.work_endpoint, model, trajectory_seed(RUN_SEED, DEADLY))
        try:
            async with asyncio.TaskGroup() as tasks:
                kept = tasks.create_task(rollouts.keep("rollout-0"))
                await ScriptedLearner(context, broker.batch_endpoint, "s").run()
                kept.cancel()
        finally:
            rollouts.end()
        assert await broker.terminate() == 0
    # More than three, because a life may bring a few tokens of its turn before the step.
    assert 3 <= rollouts.deaths.total() <= 9
    (failed,) = [event for event in broker.events if event["event"] == "attempt_failed"]
    assert failed["trajectory_id"] == DEADLY
    assert f"trajectory {DEADLY} ended 3 rollouts, one after the other" in failed["reason"]
    lines = broker.metrics_lines()
    assert [line["reason"] for line in lines if line["event"] == "dropped"] == ["failed"]
    assert sum(line["event"] == "batch" for line in lines) == NUM_BATCHES
    assert audit(broker.run_directory).problems == []
