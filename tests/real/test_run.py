"""A run of SmolLM2-135M with an adapter, in which each process is killed; then its export in plain transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess, gspo
from tests.support.runs.replayed import assert_replayed_bit_for_bit

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

MODEL = REPOSITORY / "models" / "smollm2"
NUM_BATCHES, GROUPS, GROUP_SIZE = 4, 4, 4
SETTINGS = (
    f"run.num_batches={NUM_BATCHES}", f"batch.groups_per_batch={GROUPS}", f"batch.group_size={GROUP_SIZE}",
    "evaluation.num_tasks=8", "learner.checkpoint_every_batches=2", "lora.rank=8", "learner.learning_rate=1e-3",
)  # fmt: skip


def test_an_adapter_is_trained_amid_kills_and_answers_elsewhere(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with RunProcess(REPOSITORY / "examples/smollm2.toml", directory, *SETTINGS) as run:
        run.kill_each(timeout_s=1200)
        assert run.wait_finished(2400) == 0, run.tail()
        assert run.leftovers() == []
    report = audit(directory)
    assert report.problems == []
    assert (report.num_batches, report.num_trained_trajectories) == (NUM_BATCHES, NUM_BATCHES * GROUPS * GROUP_SIZE)
    rows = run.rows("batch")
    assert all(row["mismatch_sigma"] < 1e-4 for row in rows), "engine and learner differ, with the adapter"
    assert any(row["grad_norm"] > 0 for row in rows)
    assert_replayed_bit_for_bit(directory, tmp_path / "again")

    gspo("export", str(directory), "--adapter", "--to", str(tmp_path / "export"))
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "State the final answer to the following arithmetic problem: 7 + 9 ="}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    with torch.no_grad():
        before = base(**ids).logits.numpy()
        adapter = PeftModel.from_pretrained(base, tmp_path / "export")
        after = adapter(**ids).logits.numpy()
        answer = adapter.generate(**ids, max_new_tokens=8, do_sample=False)
    assert json.loads((tmp_path / "export" / "adapter_config.json").read_text())["r"] == 8
    assert not np.allclose(before, after, atol=1e-3)
    print(tokenizer.decode(answer[0, ids["input_ids"].shape[1] :]))
