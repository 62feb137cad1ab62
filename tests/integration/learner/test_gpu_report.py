"""The steps of the report that needs a GPU are tried without one, so that they do not rot between two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gspo_services.tasks.environments import create_environment
from tests.gpu.half_hour.__main__ import Step, run_step, steps
from tests.gpu.half_hour.pack import THERE, _requirements
from tests.gpu.half_hour.shapes import SMALL, write_model


@pytest.mark.ranks
def test_layers_are_trained_and_measured(tmp_path: Path) -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.gpu.half_hour.layers", "1", "activation_checkpointing=false"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["settings"] == {"activation_checkpointing": False}
    assert 0 < found["active_parameters"] < found["parameters"]
    assert found["tokens_per_s"] > 0


def test_a_model_of_random_weights_speaks_in_words_that_its_task_can_reward(tmp_path: Path) -> None:
    assert write_model(tmp_path, SMALL | {"num_experts": 4}, 1) > 1e5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    task = create_environment("tests.gpu.half_hour.words:EvenWords", {})
    prompt = tokenizer.apply_chat_template(task.start({"number": 3}, 0).messages, add_generation_prompt=True)["input_ids"]
    assert len(prompt) == 32 + 3
    assert max(prompt) < SMALL["vocab_size"]
    assert task.step({}, tokenizer.decode([2, 3, 4, 6])).reward == 0.75
    assert task.step({}, "").reward == 0


def test_a_step_that_fails_or_hangs_is_reported_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = run_step(Step("missing", ["no_such_step"]), tmp_path)
    assert missing["status"] == 1
    assert "no_such_step" in missing["found"][-1]
    monkeypatch.setattr(Step, "command", ["sleep", "60"])
    assert run_step(Step("hangs", ["device"], 0.2), tmp_path)["status"] == 124
    monkeypatch.setattr(Step, "command", ["echo", '{"speed": 1}'])
    assert run_step(Step("works", ["device"]), tmp_path)["found"] == {"speed": 1}


def test_every_step_is_there() -> None:
    found = steps(Path("models/tiny"))
    assert len({step.name for step in found}) == len(found)
    modules = {step.words[0] for step in found} - {"pytest"}
    assert all((Path("tests/gpu/half_hour") / f"{module}.py").is_file() for module in modules), modules


def test_the_archive_lacks_only_what_the_machine_has() -> None:
    packed = {line.split("==")[0].lower() for line in _requirements(THERE.split())}
    assert {"sglang", "pyzmq", "pydantic", "transformers"} <= packed
    assert not packed & {"numpy", "triton", "aiohttp"}
