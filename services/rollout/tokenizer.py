"""Chat messages to token ids and back, without torch: the model's own tokenizer.json and chat template.

Text becomes tokens exactly once. Prompts and observations are encoded here; action tokens come from the engine as ids, and
are decoded for the environment but never encoded again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer, decoders

from gspo.model_files.text_model import text_model_of
from gspo_services.rollout.chat_template import (
    NO_ARGUMENTS,
    SENTINEL,
    Arguments,
    ChatTemplate,
    Continuation,
    Messages,
    Rewritten,
    TokenizerError,
    Tools,
    continuation,
    require_arguments,
    special_tokens,
    stop_at,
)
from gspo_services.shared.runtime.paths import way_to_model

__all__ = ["SENTINEL", "ChatTokenizer", "Messages", "TokenizerError", "TooManyTokens"]


PIECE_CHARS: Final = 4096
MOST_PROMPTS: Final = 32
"""Prompts whose tokens are remembered: a group's samples begin at about the same time, each with the same one."""


class TooManyTokens(TokenizerError):
    """A text does not fit, however it is divided into tokens."""


class ChatTokenizer:
    """Tokenizer and chat template of one model directory."""

    def __init__(
        self, directory: Path, template_arguments: Arguments = NO_ARGUMENTS, *, show_special_tokens: bool = False
    ) -> None:
        """Load. ``template_arguments`` and ``show_special_tokens``: those of the section ``[model]``.

        Raises: TokenizerError when files are missing or broken, or do not match the model's vocabulary.
        """
        config = _read_json(directory / "tokenizer_config.json")
        model_config = _text_config(directory / "config.json")
        self._tokenizer = _read_tokenizer(directory / "tokenizer.json")
        self.directory = directory
        specials = special_tokens(_with_special_map(directory, config))
        self.template = ChatTemplate(directory, config, specials)
        try:
            require_arguments(template_arguments)
        except TokenizerError as error:
            raise TokenizerError(f"model.template_arguments: {error}") from error
        self.template_arguments = dict(template_arguments)
        self._remembered: dict[str, list[int]] = {}
        self._shows_special_tokens = show_special_tokens
        self.vocab_size = _token_count(
            directory, model_config.get("vocab_size", self._tokenizer.get_vocab_size(with_added_tokens=True))
        )
        known = self._tokenizer.get_vocab(with_added_tokens=True).values()
        largest = max(known, default=-1)
        if largest >= self.vocab_size:
            raise TokenizerError(
                f"{directory}: the tokenizer has token id {largest}, the model's vocabulary has {self.vocab_size} tokens: "
                "they do not belong together"
            )
        self._has_token = np.zeros(largest + 1, dtype=bool)
        self._has_token[list(known)] = True
        self.stop_ids = self._stop_ids(directory, model_config, specials.get("eos_token"))
        pins = "date_string" in self.template_arguments
        self._follows_clock = not pins and self.template.reads_clock(self.template_arguments)

    def run_began(self, day: str) -> None:
        """From now on the template is told that this is the day, unless a variable pins another; empty: it is not known."""
        if day and self._follows_clock and self.template_arguments.get("date_string") != day:
            # In place: renderers have the same variables.
            self.template_arguments["date_string"] = day
            self._remembered.clear()

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Token ids of a new conversation, ready for the assistant's first turn. Those of a few newest are remembered."""
        try:
            key = json.dumps(messages)
        except (TypeError, ValueError, RecursionError):  # Whatever it is, the template is to say so.
            return self.encode(self.render(messages))
        ids = self._remembered.get(key)
        if ids is None:
            ids = self.encode(self.render(messages))
            if len(self._remembered) >= MOST_PROMPTS:
                self._remembered.clear()
            self._remembered[key] = ids
        return list(ids)

    def observation_ids(self, messages: Messages) -> list[int]:
        """Token ids between an assistant turn that ended with a sampled stop token and the next turn.

        They are the template's text after the turn (without its stop token, which the sampled one replaces), ``messages``,
        and the beginning of the assistant's next turn. Raises: TokenizerError.
        """
        after = self.continuation(messages, (), self.template_arguments, called_first=False)
        ids = self.encode(after.text)
        # Cut off the stop token as a token: cut off as text it would leave the whitespace that belongs to it.
        stop = self.stop_of_answer(after, ids)
        return ids if stop is None else ids[stop + 1 :]

    def continuation(self, messages: Messages, tools: Tools, arguments: Arguments, *, called_first: bool) -> Continuation:
        """Return what the template writes after an answer that ``messages`` follow; see ``continuation``.

        Raises: TokenizerError with the model's directory.
        """
        try:
            return continuation(self.template, messages, tools, arguments, called_first=called_first)
        except TokenizerError as error:
            named = str(error) if str(self.directory) in str(error) else f"{self.directory}: {error}"
            raise type(error)(named) from error

    def stop_of_answer(self, after: Continuation, ids: Sequence[int]) -> int | None:
        """Return which of ``ids``, those of ``after.text``, is the stop token of the answer; None where there is none.

        Raises: Rewritten where the template ends an earlier answer otherwise than the newest one.
        """
        stop = stop_at(ids, self.stop_ids)
        if after.is_after_call or (stop is not None and not self.decode(ids[:stop]).strip()):
            return stop
        text = after.closing()
        closing = self.encode(text)
        end = stop_at(closing, self.stop_ids)
        if end is None:
            # The first stop token is one of a later message.
            return None
        if list(ids[: end + 1]) != closing[: end + 1]:
            raise Rewritten(
                f"{self.directory}: the chat template ends an earlier answer with other tokens "
                f"({after.text[:20]!r}) than the newest one ({text[:20]!r}), so that no "
                "conversation can go on from its sampled tokens: use episodes of one turn, or a template that only appends"
            )
        return end

    def action_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of action tokens for the environment. It has special tokens with model.show_special_tokens."""
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=not self._shows_special_tokens))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, in which special tokens may be written out."""
        # As a batch of one: only a batch lets other threads run meanwhile.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def require_fewer(self, text: str, most_tokens: int) -> None:
        """Refuse a text of far more tokens, in the memory and time of those. Raises: TooManyTokens.

        A cut adds few tokens, so pieces of a text have less than twice its tokens. Encoding all of it would take some
        200 bytes a token, and as one word of a few million characters a minute.
        """
        num_tokens = 0
        for begin in range(0, len(text), PIECE_CHARS) if len(text) > PIECE_CHARS else ():
            num_tokens += len(self.encode(text[begin : begin + PIECE_CHARS]))
            if num_tokens > 2 * most_tokens:
                raise TooManyTokens(f"a text of {len(text)} characters has more than {most_tokens} tokens")

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

    def num_unknown(self, token_ids: np.ndarray[Any, Any]) -> int:
        """Count the ids without a token: a model's vocabulary is often larger than its tokenizer's."""
        inside = token_ids[(token_ids >= 0) & (token_ids < len(self._has_token))]
        return len(token_ids) - int(self._has_token[inside].sum())

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Ids that ``action_text`` leaves out."""
        return frozenset() if self._shows_special_tokens else self.special_ids

    @property
    def is_byte_level(self) -> bool:
        """Each token stands for certain bytes, whatever surrounds it."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        arguments: Arguments | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the template with ``arguments`` as its variables; None: model.template_arguments.

        Raises: TokenizerError when a message is none, or when the template refuses.
        """
        values = self.template_arguments if arguments is None else arguments
        return self.template.render(messages, tools, values, add_generation_prompt=add_generation_prompt)

    def _stop_ids(self, directory: Path, model_config: Mapping[str, Any], eos: str | None) -> frozenset[int]:
        generation = directory / "generation_config.json"
        ids: set[int] = set()
        # The engine stops at the tokens of either file.
        for config in (model_config, _read_json(generation) if generation.is_file() else {}):
            configured = config.get("eos_token_id")
            if configured is not None:
                for token in configured if isinstance(configured, list) else [configured]:
                    ids.add(_token_id(directory, token))
        if eos and (eos_id := self._tokenizer.token_to_id(eos)) is not None:
            ids.add(eos_id)
        if not ids:
            raise TokenizerError(f"{directory}: no eos_token and no eos_token_id: the end of a turn cannot be recognised")
        return frozenset(ids)


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"{path}: no such file; save the tokenizer in the fast format: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The tokenizers package raises bare Exception for every malformed file.
    except Exception as error:
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
    # A file can configure truncation or padding; a conversation must never get either.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _with_special_map(directory: Path, config: dict[str, Any]) -> Mapping[str, Any]:
    """Older models name their special tokens in a file of its own, which counts as it does for transformers."""
    path = directory / "special_tokens_map.json"
    if "added_tokens_decoder" in config or not path.is_file():
        return config
    return {**config, **_read_json(path)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TokenizerError(
            f"{path}: no such file. model.path must be a Hugging Face model directory; {way_to_model(path.parent)}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return plain


def _text_config(path: Path) -> Mapping[str, Any]:
    config = _read_json(path)
    try:
        return text_model_of(config).config
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _token_count(directory: Path, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TokenizerError(f"{directory / 'config.json'}: vocab_size is {str(value)[:100]}, expected a number from 1 up")
    return value


def _token_id(directory: Path, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TokenizerError(f"{directory}: eos_token_id is {str(value)[:100]}, expected token ids")
    return value
