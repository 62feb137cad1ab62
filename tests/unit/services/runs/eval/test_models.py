"""Which models are scored, and what is said of those that cannot be."""

import json
import shutil
from pathlib import Path

import pytest

from gspo_services.runs.eval.models import scored_models
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, override_settings


def model(at: Path, source: Path, weights: bytes = b"w") -> Path:
    shutil.copytree(source, at)
    (at / "model.safetensors").write_bytes(weights)
    return at


def checkpoint(run: Path, version: int, batch: int) -> None:
    path = run / "checkpoints" / f"version-{version:08d}" / "checkpoint.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"state": {"policy_version": version, "batch_position": batch}, "files": {}}))


def settings(run: Path, path: Path) -> Settings:
    return override_settings(Settings(), [f"run.directory={run}", f"model.path={path}"])


def test_directories_of_one_name_are_told_apart_and_changed_weights_are_another_model(
    tmp_path: Path, chat_model: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = model(tmp_path / "a" / "export", chat_model), model(tmp_path / "b" / "export", chat_model, b"v2")
    found = scored_models(Settings(), [one, other], [])
    assert [each.label.rpartition("/")[0].rpartition("/")[2] for each in found] == ["a", "b"]
    assert found[0].identity != found[1].identity
    before = scored_models(Settings(), [one], [])[0]
    assert before.label == "export"
    (one / "model.safetensors").write_bytes(b"longer")
    assert scored_models(Settings(), [one], [])[0].identity != before.identity


def test_pickles_are_no_weights(tmp_path: Path, chat_model: Path) -> None:
    path = model(tmp_path / "m", chat_model)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match=r"no weights \(\*.safetensors\); pickles .* are not read: `gspo check`"):
        scored_models(Settings(), [path], [])


def test_without_a_model_the_starting_one_is_scored(tmp_path: Path, chat_model: Path) -> None:
    path = model(tmp_path / "m", chat_model)
    assert [each.label for each in scored_models(settings(tmp_path / "run", path), [], [])] == ["m"]


def test_checkpoints_are_found_by_their_batch(tmp_path: Path, chat_model: Path) -> None:
    path, run = model(tmp_path / "m", chat_model), tmp_path / "run"
    checkpoint(run, 3, 10)
    checkpoint(run, 6, 20)
    checkpoint(run, 9, 20)
    found = scored_models(settings(run, path), [], ["20", "10"])
    assert [(each.label, each.checkpoint.policy_version) for each in found if each.checkpoint] == [
        ("batch 20", 9),
        ("batch 10", 3),
    ]
    assert [each.label for each in scored_models(settings(run, path), [], ["all"])] == ["batch 10", "batch 20"]
    assert found[0].folder == "batch-20"
    with pytest.raises(ConfigurationError, match=r"--checkpoint 15: .* after these batches: 10, 20 .*keep_checkpoints"):
        scored_models(settings(run, path), [], ["15"])
    with pytest.raises(ConfigurationError, match="batch 20 is named twice"):
        scored_models(settings(run, path), [], ["20", "20"])


def test_what_is_no_model_is_named_with_the_way_out(tmp_path: Path, chat_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such directory"):
        scored_models(Settings(), [tmp_path / "nowhere"], [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"there is no config.json: .*gspo export RUN"):
        scored_models(Settings(), [tmp_path / "empty"], [])
    with pytest.raises(ConfigurationError, match="there are no weights"):
        scored_models(Settings(), [chat_model], [])
    untold = model(tmp_path / "untold", chat_model)
    (untold / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"cannot be scored without its tokenizer: .*tokenizer.json: no such file"):
        scored_models(Settings(), [untold], [])
    path = model(tmp_path / "m", chat_model)
    with pytest.raises(ConfigurationError, match="m is named twice"):
        scored_models(Settings(), [path, path], [])
    with pytest.raises(ConfigurationError, match="there is no run in"):
        scored_models(settings(tmp_path / "none", path), [], ["3"])
