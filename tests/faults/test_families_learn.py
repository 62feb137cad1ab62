"""Families that are not Qwen3-MoE learn in a whole run while rollout and learner are killed. ``make test-faults``.

Each begins from a model that was taught arithmetic badly. What would refute that the family is trained: a held-out reward
that does not rise by ``RISE`` above its start, a problem in the audit, a group that was dropped, or log-probs of learner and
engine that differ by more than ``SIGMA``. The demo's own family is the yardstick and runs in the same way.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.support.broker.ledger_audit import audit
from tests.support.policy.taught import save_taught
from tests.support.processes.run_process import REPOSITORY, RunProcess

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]

KINDS: Final = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_text")
BATCHES: Final = 30
RISE: Final = 0.25
"""Of the mean reward of 128 held-out problems: its standard error is at most 0.045 at either end."""
SIGMA: Final = 5e-6
"""Nats a token, the root mean square over a batch: both compute in float32."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_learns_while_a_rollout_and_the_learner_are_killed(kind: str, tmp_path: Path) -> None:
    save_taught(tmp_path / "model", kind)
    settings = (
        f"model.path={tmp_path / 'model'}",
        f"run.num_batches={BATCHES}",
        "learner.checkpoint_every_batches=4",
    )
    with RunProcess(REPOSITORY / "examples/arithmetic.toml", tmp_path / "run", *settings) as run:
        run.wait_until("sixth batch", lambda: len(run.rows("batch")) >= 6, 900)
        run.kill("gspo_services.rollout", "rollout-0")
        run.wait_until("eleventh batch", lambda: len(run.rows("batch")) >= 11, 900)
        run.kill("gspo_services.learner")
        assert run.wait_finished(1200) == 0, run.tail()
    evals = [row["eval/reward"] for row in run.rows("eval")]
    batches = run.rows("batch")
    sigma, lag = max(row["mismatch_sigma"] for row in batches), max(row["lag/all"] for row in batches)
    print(f"{kind}: reward {evals[0]:.3f} to {max(evals):.3f} in {len(batches)} batches, sigma {sigma:.1e}, lag {lag:.2f}")
    report = audit(tmp_path / "run")
    assert report.problems == []
    assert report.dropped == {}
    assert report.num_trained_again >= 1, "the learner's kill repeated no batch"
    assert run.output.read_text().count("process_ended") >= 2, "nothing was killed"
    assert max(evals) >= evals[0] + RISE
    assert sigma <= SIGMA
