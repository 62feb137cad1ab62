"""Chat messages to token ids and back, without torch: the model's own tokenizer.json and chat template.

Text becomes tokens exactly once. Prompts and observations are encoded here; action tokens come from the engine as ids, and
are decoded for the environment but never encoded again.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer, decoders

Messages = Sequence[Mapping[str, object]]
SENTINEL: Final = "\u0001gspo\u0001"
"""The content of the assistant's turn when an observation is rendered alone; no template or text contains it."""


class TokenizerError(ValueError):
    """The model's tokenizer or chat template cannot be used; the text names the file and the remedy."""


class ChatTokenizer:
    """Tokenizer and chat template of one model directory."""

    def __init__(self, directory: Path) -> None:
        """Load. Raises: TokenizerError when files are missing or broken, or do not match the model's vocabulary."""
        config = _read_json(directory / "tokenizer_config.json")
        model_config = _read_json(directory / "config.json")
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path}: no such file; save the tokenizer in the fast format: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        # The tokenizers package raises bare Exception for every malformed file.
        except Exception as error:
            raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
        # A file can configure truncation or padding; a conversation must never get either.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.directory = directory
        self._specials = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self.template_source = _template_text(directory, config)
        self._template = _compile_template(self.template_source, directory)
        self.vocab_size = _token_count(
            directory, model_config.get("vocab_size", self._tokenizer.get_vocab_size(with_added_tokens=True))
        )
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= self.vocab_size:
            raise TokenizerError(
                f"{directory}: the tokenizer has token id {largest}, the model's vocabulary has {self.vocab_size} tokens: "
                "they do not belong together"
            )
        self.stop_ids = self._stop_ids(directory, model_config)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Token ids of a new conversation, ready for the assistant's first turn."""
        return self.encode(self.render(messages))

    def observation_ids(self, messages: Messages) -> list[int]:
        """Token ids between an assistant turn that ended with a sampled stop token and the next turn.

        They are the template's text after the turn (without its stop token, which the sampled one replaces), ``messages``,
        and the beginning of the assistant's next turn.
        """
        before: list[Mapping[str, object]] = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}]
        text = self.render([*before, *messages])
        _, found, tail = text.partition(SENTINEL)
        if not found:
            raise TokenizerError(
                f"{self.directory}: the chat template drops the assistant's content: multi-turn episodes cannot be rendered"
            )
        # Cut off the stop token as a token: cut off as text it would leave the whitespace that belongs to it.
        ids = self.encode(tail)
        return ids[1:] if ids and ids[0] in self.stop_ids else ids

    def action_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of action tokens for the environment, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, in which special tokens may be written out."""
        # As a batch of one: only a batch lets other threads run meanwhile.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` with special tokens; ids outside the vocabulary have no text."""
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Return the id of ``token``, spelled as in the vocabulary."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """``token_id`` as the vocabulary writes it."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``action_text`` leaves out."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def is_byte_level(self) -> bool:
        """Each token stands for certain bytes, whatever surrounds it."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        arguments: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the template with ``arguments`` as its variables. Raises: TokenizerError when the template refuses."""
        values: dict[str, Any] = {name: text for name, text in self._specials.items() if text}
        values |= arguments or {}
        # As transformers has it: a template asks whether tools are none, not only whether they are defined.
        values |= {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        try:
            return str(self._template.render(add_generation_prompt=add_generation_prompt, **values))
        # The template is a program of the model's author: it refuses with raise_exception, and may fail in any way.
        except Exception as error:
            raise TokenizerError(
                f"{self.directory}: the chat template refuses the conversation: {type(error).__name__}: {error}"
            ) from error

    def _stop_ids(self, directory: Path, model_config: dict[str, Any]) -> frozenset[int]:
        generation = directory / "generation_config.json"
        ids: set[int] = set()
        # The engine stops at the tokens of either file.
        for config in (model_config, _read_json(generation) if generation.is_file() else {}):
            configured = config.get("eos_token_id")
            if configured is not None:
                for token in configured if isinstance(configured, list) else [configured]:
                    ids.add(_token_id(directory, token))
        eos = self._specials["eos_token"]
        if eos and (eos_id := self._tokenizer.token_to_id(eos)) is not None:
            ids.add(eos_id)
        if not ids:
            raise TokenizerError(f"{directory}: no eos_token and no eos_token_id: the end of a turn cannot be recognised")
        return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TokenizerError(
            f"{path}: no such file. model.path must be a Hugging Face model directory; "
            f"`gspo model tiny {path.parent}` makes a small one"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return plain


def _token_count(directory: Path, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TokenizerError(f"{directory / 'config.json'}: vocab_size is {str(value)[:100]}, expected a number from 1 up")
    return value


def _token_id(directory: Path, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TokenizerError(f"{directory}: eos_token_id is {str(value)[:100]}, expected token ids")
    return value


def _token_text(value: Any) -> str:
    """A special token is a string or an object with a ``content``."""
    if isinstance(value, dict):
        return str(value.get("content", ""))
    return value if isinstance(value, str) else ""


def _template_text(directory: Path, config: dict[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: cannot be read: {error}") from error
    template = config.get("chat_template")
    if not isinstance(template, str):
        raise TokenizerError(f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    return template


def _compile_template(text: str, directory: Path) -> jinja2.Template:
    def raise_exception(message: str) -> str:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now(UTC).strftime(pattern)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    # Not jinja's own, which escapes for HTML; templates may ask for ASCII, as with transformers.
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"{directory}: chat template line {error.lineno}: {error}") from error
