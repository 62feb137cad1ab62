"""The demo with versions that are adapters, from real parts, in which each process is killed once."""

import math
import struct
from pathlib import Path

import pytest

from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess
from tests.support.runs.replayed import assert_replayed_bit_for_bit

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1800)]

NUM_BATCHES = 4
TOLERANCE = 2e-5


def test_a_run_of_adapters_survives_the_end_of_each_process(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "run"
    make_tiny_model(model, num_steps=250, num_eval_episodes=1, progress=lambda _: None)
    with RunProcess(
        REPOSITORY / "examples/lora.toml",
        directory,
        f"model.path={model}",
        f"run.num_batches={NUM_BATCHES}",
        "rollout.num_servers=1",
        "learner.num_ranks=2",
        "batch.groups_per_batch=8",
        "batch.group_size=4",
        "evaluation.num_tasks=8",
        "evaluation.every_batches=2",
        "learner.checkpoint_every_batches=2",
        'lora.target_modules=["attention"]',
        "lora.publish=adapter",
    ) as run:
        for number, process in enumerate(("rollout", "learner", "broker"), 1):
            run.wait_until(f"batch {number}", lambda: len(run.rows("batch")) >= number, 600)  # noqa: B023 - called at once
            run.kill(f"gspo_services.{process}")
        assert run.wait_finished(900) == 0, run.tail()
        assert run.leftovers() == []
    report = audit(directory)
    assert report.problems == []
    assert (report.num_batches, report.num_trained_trajectories, report.dropped) == (NUM_BATCHES, NUM_BATCHES * 32, {})
    rows = run.rows("batch")
    # The engine's log-probs with an adapter equal the learner's, wherever both have the same version.
    assert all(row["mismatch_sigma"] < TOLERANCE for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows), "nothing was learnt, so all versions are the same"
    served = {event["policy_version"] for event in run.events("rollout-0", "adapter_probed")}
    assert len(served) > 1
    assert all(event["mean_difference"] < TOLERANCE for event in run.events("rollout-0", "adapter_probed"))
    whole = weight_bytes(model / "model.safetensors")
    for event in run.events("learner", "published"):
        assert event["num_bytes"] < min(1_000_000, whole / 20)
    assert_replayed_bit_for_bit(directory, tmp_path / "again")


def weight_bytes(path: Path) -> int:
    """The bytes of the tensors of a safetensors file."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    return math.floor(path.stat().st_size - 8 - header)
