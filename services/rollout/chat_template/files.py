"""The chat templates of a model directory, found where transformers finds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gspo_services.rollout.chat_template.errors import TokenizerError

FILE: Final = "chat_template.jinja"
FOLDER: Final = "additional_chat_templates"
CONFIG: Final = "tokenizer_config.json"
DEFAULT: Final = "default"
WITH_TOOLS: Final = "tool_use"
"""The template for conversations with tools, where a model has several templates."""
_SPECIALS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TemplateText:
    """One template, and the file that it is from."""

    text: str
    path: Path


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, TemplateText]:
    """Return the templates of a model by their names, ``default`` among them; ``config`` is its tokenizer_config.json.

    Files of their own replace what the configuration has. Raises: TokenizerError when there is none, or no default.
    """
    found: dict[str, TemplateText] = {}
    path = directory / FILE
    if path.is_file():
        found[DEFAULT] = TemplateText(_read(path), path)
    for path in sorted((directory / FOLDER).glob("*.jinja")):
        found[path.stem] = TemplateText(_read(path), path)
    found = found or _configured(directory / CONFIG, config.get("chat_template"))
    if not found:
        raise TokenizerError(
            f"{directory}: no {FILE} and no chat_template in {CONFIG}: a base model has none; copy {FILE} from its chat "
            "model, or write one"
        )
    if DEFAULT not in found:
        raise TokenizerError(
            f"{directory}: several chat templates ({', '.join(found)}) and none is called {DEFAULT!r}: copy the one "
            f"to train with to {directory / FILE}"
        )
    return found


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates know by name, such as ``bos_token``.

    They are those of tokenizer_config.json that every tokenizer has, the others whose keys end in ``_token``, and the named
    ones of ``extra_special_tokens``.
    """
    named = {key: value for key, value in config.items() if key in _SPECIALS or key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    texts = {key: _token_text(value) for key, value in {**named, **(extra if isinstance(extra, dict) else {})}.items()}
    return {key: text for key, text in texts.items() if text is not None}


def _token_text(value: Any) -> str | None:
    """A special token is a string or an object with a ``content``; other keys end in ``_token``, too."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _configured(path: Path, value: Any) -> dict[str, TemplateText]:
    """Templates of a configuration: one text, or a list of {name, template}, or a table of texts by their names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: TemplateText(value, path)}
    named = value
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        if len(named) != len(value):
            named = None
    if not isinstance(named, dict) or not all(isinstance(part, str) for pair in named.items() for part in pair):
        raise TokenizerError(
            f'{path}: chat_template is {str(value)[:100]!r}: expected a text, or a list of {{"name": ..., "template": ...}} '
            "with different names"
        )
    return {name: TemplateText(text, path) for name, text in named.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
