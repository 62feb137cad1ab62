"""What is no reward model is refused by its files, with the file, its value and the way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_services.tasks.reward_model import require_classifier

GOOD = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def written(folder: Path, config: Any = GOOD, *, without: str = "") -> Path:
    for name, text in {"config.json": json.dumps(config), "model.safetensors": "", "tokenizer.json": "{}"}.items():
        if name != without:
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "config", [GOOD, {**GOOD, "num_labels": 1}, {"architectures": GOOD["architectures"], "num_labels": 1}]
)
def test_a_classifier_with_one_output_is_taken(tmp_path: Path, config: Any) -> None:
    require_classifier(written(tmp_path, config))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**GOOD, "architectures": ["Qwen3ForCausalLM"]}, "architectures is ['Qwen3ForCausalLM']"),
        ({**GOOD, "architectures": None}, "architectures is None"),
        ({**GOOD, "id2label": {"0": "bad", "1": "good"}}, "has 2 outputs (num_labels, id2label)"),
        # What transformers leaves out of the file for two.
        ({"architectures": GOOD["architectures"]}, "has 2 outputs (num_labels, id2label)"),
        ([], "cannot be read"),
    ],
)
def test_another_architecture_or_two_outputs_are_refused(tmp_path: Path, config: Any, text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        require_classifier(written(tmp_path, config))
    assert (text in str(refusal.value), str(tmp_path / "config.json") in str(refusal.value)) == (True, True), refusal.value


@pytest.mark.parametrize(
    ("without", "text"),
    [
        ("config.json", "config.json: name the directory of a model"),
        ("model.safetensors", "has no weights: expected model.safetensors"),
        ("tokenizer.json", "has no tokenizer: expected tokenizer.json"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, without: str, text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        require_classifier(written(tmp_path, without=without))
    assert text in str(refusal.value)


def test_an_adapter_is_named_as_one(tmp_path: Path) -> None:
    (written(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter"):
        require_classifier(tmp_path)
