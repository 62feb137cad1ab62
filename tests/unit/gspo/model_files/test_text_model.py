"""The text model of a configuration, held against transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.model_files.file_names import file_tensors, keep_names
from gspo.model_files.text_model import TOWERS, named, text_model_of
from tests.support.policy.towers import CHECKPOINTS


def whole_config(kind: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": ["AClass"], **CHECKPOINTS[kind], **changes}


@pytest.mark.parametrize("kind", sorted(TOWERS))
def test_names_and_values_are_those_that_transformers_gives_to_the_whole(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    config, found = AutoConfig.for_model(**whole_config(kind)), text_model_of(whole_config(kind))
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
        text = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True))
    assert type(whole).__name__ == TOWERS[kind].architecture
    assert found.config["architectures"] == [TOWERS[kind].architecture]
    keep_names(text, found)
    stored = revert_weight_conversion(whole, whole.state_dict())
    own = file_tensors(text, text.state_dict())
    assert {name: each.shape for name, each in own.items()} == {
        name: each.shape for name, each in stored.items() if found.owns(name)
    }
    assert any(not found.owns(name) for name in stored)


@pytest.mark.parametrize("kind", sorted(TOWERS))
def test_what_files_leave_to_the_class_of_the_text_model_is_what_it_says(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    for text_type in TOWERS[kind].text_types:
        own = CONFIG_MAPPING[text_type]().to_dict()
        assert {key: own[key] for key in TOWERS[kind].defaults} == TOWERS[kind].defaults


def test_another_configuration_is_its_own_text_model() -> None:
    for config in ({"model_type": "qwen3", "vocab_size": 3}, {"model_type": "llava", "text_config": {}}, {}):
        found = text_model_of(config)
        assert found.config is config
        assert named("model.norm.weight", found.names) == "model.norm.weight"
        assert found.owns("vision_tower.norm.weight")


def test_values_of_the_whole_that_concern_the_text_count() -> None:
    whole = whole_config(
        "qwen3_5", tie_word_embeddings=True, eos_token_id=[1, 2], quantization_config={"quant_method": "fp8"}
    )
    text = text_model_of(whole).config
    assert (text["tie_word_embeddings"], text["eos_token_id"]) == (True, [1, 2])
    assert text["quantization_config"] == {"quant_method": "fp8"}
    assert (text["model_type"], text["hidden_size"]) == ("qwen3_5_text", 64)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (whole_config("gemma3", text_config=None), "text_config of a gemma3 model is None"),
        (whole_config("mistral3", text_config={"model_type": "mistral4"}), "is mistral4: .* mistral and ministral3"),
        (whole_config("gemma3", tie_word_embeddings=False), "is False and that of text_config True"),
        (whole_config("mistral3", tie_word_embeddings=True), "is True and that of text_config False"),
    ],
)
def test_what_is_trained_by_nobody_or_read_in_two_ways_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        text_model_of(config)


def test_no_other_module_reads_the_text_model_of_a_configuration() -> None:
    own = Path(text_model_of.__code__.co_filename).resolve()
    others = [path for room in ("gspo", "services") for path in (own.parents[2] / room).rglob("*.py") if path != own]
    assert len(others) > 500
    names = [f'"{name}"' for name in ("text_config", *TOWERS, *(tower.architecture for tower in TOWERS.values()))]
    readers = {path.name for path in others if any(name in path.read_text() for name in names)}
    assert readers == {"autoep.py", "export.py", "model.py", "platform.py"}, (
        "DeepSpeed's name of a preset; a copy of it; why another one is refused; which class SGLang is about to make"
    )
