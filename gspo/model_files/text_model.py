"""The text model of a config.json: all of it, or one tower of a checkpoint that also takes images.

Of such a checkpoint the text tower is trained, as the family's causal language model. Its configuration is that of
``text_config``, and its weights have other names in the files, which are also those that SGLang's class loads. The other
towers are never read. Names and defaults are those of transformers 5.19, SGLang 0.5.23 and the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

TEXT_TOWER: Final = "language_model."
INSIDE: Final = f"model.{TEXT_TOWER}"
"""How the names of a text model begin that is one tower of several, in files and in versions."""
_NESTED: Final = {"model.": f"{TEXT_TOWER}model.", "lm_head.": f"{TEXT_TOWER}lm_head."}
_INSIDE: Final = {"model.": INSIDE}


@dataclass(frozen=True, kw_only=True)
class Tower:
    """How one class that also takes images has its text model."""

    architecture: str
    """The class, in transformers and in SGLang."""
    text_types: tuple[str, ...]
    """What ``text_config.model_type`` may be; the first where it is not given."""
    names: Mapping[str, str]
    """The beginnings of the text model's names, and what the files have in their place."""
    ties: bool
    """SGLang reads ``tie_word_embeddings`` of the whole; False: that of ``text_config``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What published files leave to the class of ``text_config``."""


TOWERS: Final[Mapping[str, Tower]] = {
    "gemma3": Tower(
        architecture="Gemma3ForConditionalGeneration",
        text_types=("gemma3_text",),
        names=_NESTED,
        ties=False,
        defaults={
            "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "max_position_embeddings": 131_072, "tie_word_embeddings": True,
        },
    ),
    "mistral3": Tower(
        architecture="Mistral3ForConditionalGeneration",
        text_types=("mistral", "ministral3"),
        names=_NESTED,
        ties=False,
        defaults={"tie_word_embeddings": False},
    ),
    "qwen3_5": Tower(
        architecture="Qwen3_5ForConditionalGeneration", text_types=("qwen3_5_text",), names=_INSIDE, ties=True,
        defaults={"tie_word_embeddings": False},
    ),
    "qwen3_5_moe": Tower(
        architecture="Qwen3_5MoeForConditionalGeneration", text_types=("qwen3_5_moe_text",), names=_INSIDE, ties=True,
        defaults={"tie_word_embeddings": False},
    ),
}  # fmt: skip
"""By ``model_type``."""
TOWER_CLASSES: Final = frozenset(tower.architecture for tower in TOWERS.values())


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """What is trained of a checkpoint."""

    config: Mapping[str, Any]
    """As config.json of the text model alone, but with the ``architectures`` of the whole, which SGLang serves."""
    names: Mapping[str, str] = field(default_factory=dict)
    """See ``Tower``; empty where the text model is the whole."""

    def file_name(self, name: str) -> str:
        """Return the name in the checkpoint's files of what the text model's own files would call ``name``."""
        return named(name, self.names)

    def owns(self, file_name: str) -> bool:
        """Tell whether a tensor of the checkpoint's files belongs to the text model."""
        return not self.names or file_name.startswith((*self.names.values(), "lm_head."))


def text_model_of(config: Mapping[str, Any]) -> TextModel:
    """Find the text model of a config.json.

    Raises: ValueError for a text tower of another type than its class is trained with, and for one of which transformers and
    SGLang would disagree whether its head is the embedding.
    """
    kind = str(config.get("model_type", ""))
    tower = TOWERS.get(kind)
    if tower is None:
        return TextModel(config=config)
    given = config.get("text_config")
    if not isinstance(given, Mapping):
        raise ValueError(f"text_config of a {kind} model is {str(given)[:100]}; copy or download config.json again")
    text = {**tower.defaults, "model_type": tower.text_types[0], **given}
    if text["model_type"] not in tower.text_types:
        raise ValueError(
            f"text_config.model_type is {str(text['model_type'])[:100]}: of {kind} models those with "
            f"{' and '.join(tower.text_types)} are trained; use one of them"
        )
    _tie(text, config, tower)
    for key in ("quantization_config", "eos_token_id"):
        if key in config:
            text[key] = config[key]
    return TextModel(config=text | {"architectures": [tower.architecture]}, names=tower.names)


def is_tower(config: Mapping[str, Any]) -> bool:
    """Tell whether the configuration of a text model (``TextModel.config``) is that of one tower of several."""
    classes = config.get("architectures")
    return isinstance(classes, list) and bool(classes) and str(classes[0]) in TOWER_CLASSES


def _tie(text: dict[str, Any], config: Mapping[str, Any], tower: Tower) -> None:
    """Set ``tie_word_embeddings`` as SGLang reads it. transformers reads that of the whole."""
    said = config.get("tie_word_embeddings")
    if tower.ties:
        text["tie_word_embeddings"] = tower.defaults["tie_word_embeddings"] if said is None else said
    elif said is not None and said != text["tie_word_embeddings"]:
        raise ValueError(
            f"tie_word_embeddings is {said} and that of text_config {text['tie_word_embeddings']}: transformers reads the "
            "first and SGLang the second; give both the same value in config.json"
        )


def named(name: str, names: Mapping[str, str]) -> str:
    """Exchange the beginning of a name."""
    begin = next((each for each in names if name.startswith(each)), "")
    return names[begin] + name[len(begin) :] if begin else name
