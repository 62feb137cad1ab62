"""The names of a model's weights in its files, which are those that engines load: transformers' own conversion, applied in
reverse, and of a text tower the names that it has in the whole checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gspo.model_files.configuration import READ_AS, read_whole, require_unquantised
from gspo.model_files.text_model import TextModel, named, text_model_of

_NOTED: Final = "text_names"
"""The attribute of a model with the names of ``TextModel``."""


def load_config(model_dir: Path) -> tuple[Any, TextModel]:
    """Return the configuration object of transformers for the text model of a folder, and what it is of the whole.

    Raises: ValueError, as ``text_model_of``, and for a quantised model, or one that only its own code knows; OSError and
    others of transformers.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = read_whole(model_dir)
    found = text_model_of(content)
    require_unquantised(found.config)
    kind = str(content.get("model_type"))
    if kind in READ_AS.values():
        return CONFIG_MAPPING[kind].from_dict(content), found
    if content.get("auto_map") and kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{model_dir}: {kind[:50]} is known to code of its own alone (auto_map), which is never executed; use a model "
            "that transformers has a class of"
        )
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    if found.names:
        config = config.get_text_config(decoder=True)
        config.tie_word_embeddings = found.config["tie_word_embeddings"]
    return config, found


def keep_names(model: Any, text: TextModel) -> None:
    """Note on a transformers model under which names files and engines have its weights."""
    setattr(model, _NOTED, text.names)


def is_tower(model: Any) -> bool:
    """Tell whether the model is one tower of its checkpoint."""
    return bool(_names(model))


def file_tensors(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a model's parameters into the tensors of its files: transformers' own reverse conversion, in the names that
    ``keep_names`` has noted."""
    from transformers.core_model_loading import revert_weight_conversion

    names = _names(model)
    return {named(name, names): tensor for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def file_name(model: Any, name: str) -> str:
    """Return what the files call a tensor that has the parameter's own name there."""
    return named(name, _names(model))


def _names(model: Any) -> Mapping[str, str]:
    return getattr(model, _NOTED, {})
