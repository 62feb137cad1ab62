"""What can be said of a reward model from its files, before anything loads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

CLASS_END: Final = "ForSequenceClassification"
_TOKENIZERS: Final = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
_UNSAID_OUTPUTS: Final = 2
"""What transformers takes where config.json says nothing."""


def require_classifier(path: Path) -> None:
    """Check that ``path`` holds a classifier with one output, its weights and a tokenizer.

    Raises: ValueError with the file, its value and the way out.
    """
    config = _config(path)
    if (path / "adapter_config.json").is_file():
        raise ValueError(f"{path} holds an adapter (adapter_config.json): merge it into its model, and save that")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not (isinstance(name, str) and name.endswith(CLASS_END)):
        raise ValueError(
            f"{path}/config.json: architectures is {str(names)[:100]}, and a reward model's ends in {CLASS_END}, "
            "with one output; a model that writes its verdict is a judge (docs/guide/rewards.md)"
        )
    outputs = num_outputs(config)
    if outputs != 1:
        raise ValueError(
            f"{path}/config.json: {name} has {outputs} outputs (num_labels, id2label), and a reward is one number: use one "
            "that was trained with num_labels = 1"
        )
    _require_one(path, ("model.safetensors", "model.safetensors.index.json"), "weights", "save_pretrained writes them")
    _require_one(path, _TOKENIZERS, "tokenizer", "tokenizer.save_pretrained writes it")


def num_outputs(config: dict[str, Any]) -> int:
    """The outputs of the classifier that a config.json describes."""
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict):
        return len(labels)
    return number if isinstance(number, int) else _UNSAID_OUTPUTS


def weight_bytes(path: Path) -> int:
    """The size of a model's weight files in bytes."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise ValueError(f"there is no {file}: name the directory of a model that transformers has saved") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _require_one(path: Path, names: Sequence[str], what: str, way_out: str) -> None:
    if not any((path / name).is_file() for name in names):
        raise ValueError(f"{path} has no {what}: expected {' or '.join(names)}; {way_out}")
