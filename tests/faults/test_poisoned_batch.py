"""Real learner processes (DeepSpeed) get a batch on which training raises, and then are told to skip it."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import BatchFailed, BatchRequest, Hello, Message, Published, SkipBatch, Trained
from tests.support.learner.scripted_broker import a_training_batch, send_batch
from tests.support.wire.zmq_ends import ScriptedEnd, a_welcome, zmq_context

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
START_S = 120.0
VOCABULARY = 64


def write_run(directory: Path, endpoint: str) -> Path:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory / "model")
    path = directory / "run.toml"
    path.write_text(
        f'[run]\ndirectory = "{directory / "run"}"\n[model]\npath = "{directory / "model"}"\n'
        "[batch]\ngroup_size = 2\ngroups_per_batch = 4\nmini_batches = 1\n"
        f'[broker]\nbatch_endpoint = "{endpoint}"\n'
        '[learner]\nmetrics_port = 0\nweights_endpoint = "tcp://127.0.0.1:*"\nlearning_rate = 0.01\n'
    )
    return path


@contextlib.asynccontextmanager
async def learner(config: Path, end: ScriptedEnd, version: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """One life of the learner, welcomed. It is gone at the end."""
    command = [sys.executable, "-m", "gspo_services.learner", str(config)]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    )
    try:
        async with asyncio.timeout(START_S):
            await end.welcome(policy_version=version)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def take(end: ScriptedEnd, kind: type[Message]) -> Message:
    """The next message of this kind; everything on the way is acknowledged. A learner that heard nothing while it started
    connects again."""
    async with asyncio.timeout(START_S):
        while True:
            received = await end.receive()
            if received.seq is not None:
                await end.acknowledge(received)
            if isinstance(received.message, Hello):
                await end.reply(a_welcome(policy_version=0))
            if isinstance(received.message, kind):
                return received.message


async def test_a_learner_reports_the_batch_that_it_cannot_train_and_skips_it_when_told(tmp_path: Path) -> None:
    batch = a_training_batch(0, 1, bad_token=VOCABULARY + 1)
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        config = write_run(tmp_path, end.endpoint)
        digests = set()
        for version in (0, 1):
            async with learner(config, end, version) as process:
                published = await take(end, Published)
                assert isinstance(published, Published)
                digests.add(published.digest)
                await take(end, BatchRequest)
                await send_batch(end, batch)
                failed = await take(end, BatchFailed)
                assert isinstance(failed, BatchFailed)
                assert (failed.index, failed.raised) == (0, True)
                assert "IndexError" in failed.reason
                async with asyncio.timeout(START_S):
                    assert await process.wait() == 1
        async with learner(config, end, 2):
            first = await take(end, Published)
            assert isinstance(first, Published)
            await take(end, BatchRequest)
            await end.reply(SkipBatch(index=0, reason=f"2 learners could not train it: {failed.reason}"))
            skipped = await take(end, Published)
            assert isinstance(skipped, Published)
            assert skipped.trained_batches == 1
            assert digests == {first.digest, skipped.digest}, "nothing was trained"
            report = await take(end, Trained)
            assert report == Trained(index=0, policy_version=skipped.policy_version, metrics={}, skipped=True)
            await take(end, BatchRequest)
            await send_batch(end, a_training_batch(1, skipped.policy_version))
            trained = await take(end, Published)
            assert isinstance(trained, Published)
            assert trained.trained_batches == 2
            assert trained.digest not in digests
