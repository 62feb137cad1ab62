"""``gspo export`` on the files of a run: what it writes, and what it refuses."""

import json
import re
import shutil
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo_services.runs.export.__main__ import export_command
from gspo_services.runs.export.weights import CheckpointWeights
from gspo_services.runs.export.writer import write_export
from gspo_services.shared.runtime.operations import only_operation
from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import EnvironmentSection, Model, Run, Settings
from tests.support.learner.tiny_model import save_tiny_model, tiny_qwen3_moe
from tests.support.processes.small_disk import small_disk
from tests.support.processes.small_run import write_small_run
from tests.support.runs.model_checkpoints import write_model_checkpoint


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starting model, with a README of its own."""
    directory = tmp_path_factory.mktemp("start") / "model"
    save_tiny_model(directory)
    (directory / "README.md").write_text("# Of the starting model\n")
    return directory


@pytest.fixture(scope="module")
def trained() -> Any:
    return tiny_qwen3_moe(seed=7)


@pytest.fixture
def run(tmp_path: Path, start: Path, trained: Any) -> Path:
    """A run that was interrupted after 30 batches, with checkpoints after 10 and 20."""
    directory = tmp_path / "run"
    directory.mkdir()
    options = {"level": 3, "api_key": "sk-very-secret"}
    write_run_settings(
        Settings(
            run=Run(directory=directory, num_batches=60),
            model=Model(path=start),
            environment=EnvironmentSection(name="arithmetic", options=options),
        )
    )
    lines = [
        {"event": "batch", "batch": 9, "policy_version": 11, "train/reward": 0.4},
        {"event": "eval", "batch": 10, "policy_version": 11, "eval/reward": 0.75, "num_finished": 64, "num_failed": 0},
        {"event": "eval", "batch": 20, "policy_version": 21, "eval/reward": 0.5, "num_finished": 63, "num_failed": 1},
    ]
    texts = (json.dumps({"line": number, **line}) + "\n" for number, line in enumerate(lines, start=1))
    (directory / "metrics.jsonl").write_text("".join(texts) + '{"event": "ba')
    write_model_checkpoint(directory, trained, 11, 10)
    write_model_checkpoint(directory, tiny_qwen3_moe(seed=8), 21, 20)
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_best_checkpoint_becomes_a_model_that_transformers_loads_bit_for_bit(
    run: Path, tmp_path: Path, trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "metrics.jsonl"
    path.write_text("no line\n" + path.read_text())
    before = files(run)
    assert export_command([str(run), "--checkpoint", "best", "--to", str(tmp_path / "best")]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'best'}: policy version 11, after 10 batches, held-out reward 0.75\n"
        f"note: {path}: 1 damaged line is left out; the first is line 1: not JSON\n"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best", dtype="auto")
    expected = trained.state_dict()
    assert set(model.state_dict()) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert files(run) == before, "nothing of the run is touched"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "run"]


def test_the_card_says_how_the_model_was_trained_and_no_secret(run: Path, tmp_path: Path) -> None:
    assert export_command([str(run), "--checkpoint", "10", "--to", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for told in (
        "https://arxiv.org/abs/2507.18071",
        "after 10 of 60 batches",
        "Held-out reward: **0.75** (64 tasks)",
        "| 10 | 11 | 0.75 | 0.4 | 64 | this model |",
        "| 20 | 21 | 0.5 |  | 63 |  |",
        "group_size = 8",
        "learning_rate = 1e-06",
        "- Environment: `arithmetic`",
        'options = { level = 3, api_key = "***" }',
        f"- torch {version('torch')}",
        "gspo export run --checkpoint 10",
    ):
        assert told in card, told
    for hidden in ("sk-very-secret", "endpoint", "tcp://", "Of the starting model", str(tmp_path)):
        assert hidden not in card, hidden


def test_without_a_number_the_newest_is_written_beside_the_run(run: Path) -> None:
    assert export_command([str(run)]) == 0
    assert (run.with_name("run-batch-20") / "model.safetensors").is_file()


def test_nothing_is_written_over(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "there"
    place.mkdir()
    assert export_command([str(run), "--to", str(place)]) == 0, "an empty directory is nothing"
    before = files(place)
    assert export_command([str(run), "--checkpoint", "10", "--to", str(place)]) == 2
    assert f"{place} already exists: name another directory with --to, or remove it" in capsys.readouterr().err
    assert files(place) == before
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert export_command([str(run), "--to", str(tmp_path / "dangling")]) == 2
    assert export_command([str(run), "--to", str(run / "checkpoints" / "mine")]) == 2


def test_a_flipped_bit_of_a_weight_is_found_and_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "version-0000000021-batch-0000000020" / "engine" / "model.norm.weight.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # The tensors are in order of their names: "weight" is the last.
    path.write_bytes(data)
    assert export_command([str(run), "--to", str(tmp_path / "model")]) == 1
    assert f"{path} has digest" in capsys.readouterr().err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["run"]
    assert export_command([str(run), "--checkpoint", "10", "--to", str(tmp_path / "model")]) == 0


def test_a_checkpoint_that_is_half_deleted_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "checkpoints" / "version-0000000021-batch-0000000020"
    (newest / "engine" / "lm_head.weight.safetensors").unlink()
    assert export_command([str(run), "--to", str(tmp_path / "model")]) == 1
    assert "lm_head.weight" in capsys.readouterr().err
    (newest / "checkpoint.json").write_text("{")
    assert export_command([str(run), "--checkpoint", "20", "--to", str(tmp_path / "model")]) == 2
    assert "has checkpoints after these batches: 10" in capsys.readouterr().err


def test_a_learner_may_remove_the_checkpoint_that_is_being_exported(run: Path, tmp_path: Path, start: Path) -> None:
    checkpoint = run / "checkpoints" / "version-0000000011-batch-0000000010"
    with ExitStack() as hold:
        weights = CheckpointWeights(checkpoint, start, hold)
        shutil.rmtree(checkpoint)
        write_export(weights, tmp_path / "model", dtype="float32", model_dir=start, card="")
    assert export_command([str(run), "--to", str(tmp_path / "other")]) == 0
    found = load_file(tmp_path / "model" / "model.safetensors")
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert not torch.equal(found["lm_head.weight"], other["lm_head.weight"])


def test_a_full_disk_has_a_status_of_its_own_and_keeps_nothing(
    run: Path, tmp_path: Path, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        assert export_command([str(run), "--to", str(disk.path / "model")]) == 5
        assert "MiB are free there: make room" in capsys.readouterr().err
        assert list(disk.path.iterdir()) == []


def test_weights_are_rounded_as_the_learner_served_them(tmp_path: Path, start: Path, trained: Any) -> None:
    checkpoint = write_model_checkpoint(tmp_path / "run", trained, 1, 1, dtype="bfloat16")
    with ExitStack() as hold:
        weights = CheckpointWeights(checkpoint, start, hold)
        for dtype in ("bfloat16", "float32"):
            write_export(weights, tmp_path / dtype, dtype=dtype, model_dir=start, card="")
    half, whole = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("bfloat16", "float32"))
    master = trained.state_dict()["lm_head.weight"]
    assert torch.equal(half["lm_head.weight"], master.bfloat16())
    assert torch.equal(whole["lm_head.weight"], master.bfloat16().float())
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_that_the_ledger_does_not_know_are_refused(
    tmp_path: Path, start: Path, trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger has another digest for version 2."""
    run = tmp_path / "run"
    write_small_run(run)
    settings = json.loads((run / "settings.json").read_text())
    settings["model"]["path"] = str(start)
    (run / "settings.json").write_text(json.dumps(settings))
    shutil.rmtree(run / "checkpoints")
    write_model_checkpoint(run, trained, 2, 1)
    assert export_command([str(run)]) == 1
    assert "these are not the weights that the ledger knows for this version" in capsys.readouterr().err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["run"]
    # Where versions are adapters the ledger knows them by another digest than that of the sum.
    settings["lora"] = settings["lora"] | {"rank": 4, "publish": "adapter"}
    (run / "settings.json").write_text(json.dumps(settings))
    assert export_command([str(run)]) == 0


def test_what_a_killed_export_left_is_replaced_and_a_live_one_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / ".partial-model"
    left.mkdir()
    (left / "shard-0.tmp").write_bytes(b"half")
    with only_operation(tmp_path / "model", "export", ""):
        assert export_command([str(run), "--to", str(tmp_path / "model")]) == 1
        assert re.search(r"another `gspo export` of .* is writing to .*/model: wait", capsys.readouterr().err)
        assert (left / "shard-0.tmp").read_bytes() == b"half"
    assert export_command([str(run), "--to", str(tmp_path / "model")]) == 0
    assert not left.exists()
    assert not (tmp_path / "model" / "shard-0.tmp").exists()


def test_errors_name_the_way_out(run: Path, tmp_path: Path, start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert export_command(list(words)) == 2
        return capsys.readouterr().err

    assert "is where the run's learner exports" in refused(str(run), "--to", str(run / "export"))
    assert "there is no such run" in refused(str(tmp_path / "nothing"))
    assert "settings.json: missing" in refused(str(tmp_path))
    assert "name its directory on this machine with --model DIR" in refused(str(run), "--model", str(tmp_path))
    other = tmp_path / "other"
    shutil.copytree(start, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    assert "holds a Qwen3MoeForCausalLM: name the model that the run started from" in refused(
        str(run), "--model", str(other)
    )
