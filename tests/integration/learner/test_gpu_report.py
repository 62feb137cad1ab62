"""The steps of the report that needs a GPU are tried without one, so that they do not rot between two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from gspo_services.tasks.environments import create_environment
from tests.gpu.half_hour.__main__ import archive, run_step, wrong_python
from tests.gpu.half_hour.pack import THERE, _describe_ourselves, _requirements
from tests.gpu.half_hour.shapes import SMALL, write_model
from tests.gpu.half_hour.steps import GROUP_LIMIT_S, Step, steps


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
    missing = run_step(Step("missing", 1, ["no_such_step"], 60), tmp_path)
    assert missing["status"] == 1
    assert "no_such_step" in missing["found"][-1]
    # A child that its parent does not wait for, and that would hold the GPU in the next step.
    monkeypatch.setattr(Step, "command", ["sh", "-c", "sleep 60 & echo $!; sleep 60"])
    hangs = run_step(Step("hangs", 1, ["device"], 0.5), tmp_path)
    assert (hangs["status"], hangs["ended_processes"]) == (124, 3)
    assert not psutil.pid_exists(int((tmp_path / "hangs.log").read_text()))
    monkeypatch.setattr(Step, "command", ["echo", '{"speed": 1}'])
    assert run_step(Step("works", 1, ["device"], 60), tmp_path)["found"] == {"speed": 1}


def test_an_archive_for_another_python_is_refused_before_the_first_step(tmp_path: Path) -> None:
    _describe_ourselves(tmp_path, "3.12")
    about = tmp_path / "gspo-0.1.0.dist-info"
    required = Distribution.at(about).metadata["Requires-Python"]
    assert wrong_python(required, "3.12.9") is None
    assert wrong_python(None, "3.12.9") is None
    said = wrong_python(required, "3.11.7")
    assert said is not None
    assert "made for Python ==3.12.*, and this is 3.11.7" in said
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: gspo\nVersion: 0.1.0\nRequires-Python: ==3.8.*\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    command = [sys.executable, "-m", "tests.gpu.half_hour", "--out", str(tmp_path / "out"), "--only", "none"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "made for Python ==3.8.*" in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_step_is_there_and_every_group_fits_one_command() -> None:
    found = steps(Path("models/tiny"), Path("models/smollm2"), Path("/tmp/work"))
    assert len({step.name for step in found}) == len(found)
    modules = {step.words[0] for step in found} - {"pytest"}
    assert all((Path("tests/gpu/half_hour") / f"{module}.py").is_file() for module in modules), modules
    limits: dict[int, float] = {}
    for step in found:
        limits[step.group] = limits.get(step.group, 0) + step.limit_s
    assert max(limits.values()) <= GROUP_LIMIT_S, limits


def test_the_archive_of_the_logs_has_what_can_be_read_of_a_run(tmp_path: Path) -> None:
    for name in ("out/logs/run.log", "work/demo/metrics.jsonl", "work/demo/checkpoints/model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    archive(tmp_path / "out", tmp_path / "work")
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as tar:
        assert tar.getnames() == ["logs/run.log", "work/demo/metrics.jsonl"]


def test_the_archive_lacks_only_what_the_machine_has() -> None:
    packed = {line.split("==")[0].lower() for line in _requirements(THERE.split())}
    assert {"sglang", "pyzmq", "pydantic", "transformers"} <= packed
    assert not packed & {"numpy", "triton", "aiohttp"}
