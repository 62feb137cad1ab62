"""Without a learner, rollouts generate with the starting weights, and a learner can train on the groups afterwards."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_services.runs.audit import audit_run
from gspo_services.runs.replay.__main__ import replay_command
from tests.support.broker.peers import ScriptedRollout
from tests.support.broker.process import broker_process, eventually
from tests.support.learner.checkpoints import newest_given
from tests.support.wire.zmq_ends import in_background, zmq_context

pytestmark = pytest.mark.timeout(1200)
VOCABULARY = 60_000  # of the scripted rollout's tokens


def make_model(directory: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)


async def test_groups_generated_without_a_learner_are_trained_on_by_replay(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    async with (
        broker_process(
            tmp_path,
            run={"num_batches": 2},
            model={"path": str(tmp_path / "model")},
            rollout={"num_servers": 0},
            learner={"metrics_port": 0, "weights_endpoint": "tcp://127.0.0.1:*", "learning_rate": 0.01},
        ) as broker,
        zmq_context() as context,
    ):
        publisher = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gspo_services.learner.starting_weights", str(broker.config), env={**os.environ}
        )
        rollout = ScriptedRollout(context, broker.work_endpoint, "rollout-0", "a")
        async with in_background(rollout.run()):
            await eventually(lambda: broker.count("group_complete") == 4, 600)
        assert broker.count("batch_assembled") == 0
        publisher.send_signal(signal.SIGTERM)
        assert await publisher.wait() == 0
        assert await broker.terminate() == 0
    assert newest_given(broker.run_directory / "checkpoints") == 1, "other weights must not get it"
    audit = audit_run(broker.run_directory)
    assert audit.problems == []
    assert [(row.status, row.groups, row.trajectories) for row in audit.outcomes] == [("complete", 4, 8)]

    # In a process of its own, as everything that DeepSpeed has touched is.
    command = [sys.executable, "-m", "gspo_services.runs.replay", str(broker.run_directory)]
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert await process.wait() == 0
    out = tmp_path / "run-replay"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == [0, 1]
    # The publisher's bytes are the learner's own, and training has changed them each time.
    assert json.loads((out / "replay.json").read_text())["weights"] == {
        "0": "same",
        "1": "not recorded",
        "2": "not recorded",
    }
    assert len({line["weights_digest"] for line in lines}) == 2
    assert [line["lag/all"] for line in lines] == [0.0, 1.0]
    assert (out / "export" / "model.safetensors").is_file()
    assert replay_command([str(broker.run_directory)]) == 2, "what was written is not overwritten"
