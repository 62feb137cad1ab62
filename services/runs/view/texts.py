"""The text of tokens, one by one, for a model whose files may be gone."""

import codecs
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.rollout.rendering import byte_of_character
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import read_run_settings

REPLACEMENT: Final = "\ufffd"
WINDOW: Final = 8
"""How many earlier tokens the text of a token may depend on, if tokens are not bytes."""
RETRY_S: Final = 2.0
"""A missing tokenizer is not looked for again for each of many texts."""


class Texts:
    """Texts of a run's tokens. Without a tokenizer there are none, and ``error`` says why."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer: ChatTokenizer | None = None
        self._bytes = byte_of_character()
        self._pieces: dict[int, bytes] = {}
        self.error = ""
        self._next_try = 0.0

    def load(self) -> bool:
        """Load a tokenizer: the export's, or the model's, whose path may mean another here. Returns whether there is one."""
        if self._tokenizer is not None:
            return True
        if self.error and time.monotonic() < self._next_try:
            return False
        places, errors = [self._directory / "export"], []
        try:
            places.append(read_run_settings(self._directory).model.path)
        except (ConfigurationError, AttributeError, TypeError) as error:
            errors.append(str(error))
        for place in places:
            try:
                self._tokenizer = ChatTokenizer(place)
            except TokenizerError as error:
                errors.append(str(error))
            else:
                self.error = ""
                return True
        self._next_try = time.monotonic() + RETRY_S
        self.error = f"Token ids are shown without text: {'; '.join(errors)}"
        return False

    @property
    def special_ids(self) -> frozenset[int]:
        """Return ids of tokens that are not text of the conversation; none without a tokenizer."""
        return self._tokenizer.special_ids if self._tokenizer is not None and self.load() else frozenset()

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; joined, the text of all. A character of several tokens belongs to the last
        of them. Bytes that are not UTF-8 become U+FFFD. Without a tokenizer all are empty."""
        if not self.load() or self._tokenizer is None:
            return [""] * len(token_ids)
        return self._by_bytes(token_ids) if self._tokenizer.is_byte_level else self._by_windows(token_ids)

    def said(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones; without a tokenizer, the ids."""
        if not self.load():
            return " ".join(map(str, token_ids))
        special = self.special_ids
        return "".join(self.of([each for each in token_ids if each not in special])).strip()

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones written out."""
        return "".join(self.of(token_ids))

    def _by_bytes(self, token_ids: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._piece(token_id)) for token_id in token_ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _piece(self, token_id: int) -> bytes:
        assert self._tokenizer is not None
        if token_id not in self._pieces:
            token = self._tokenizer.token(token_id) if 0 <= token_id < self._tokenizer.vocab_size else None
            values = [self._bytes.get(character) for character in token or ""]
            # A token outside the alphabet was added to the vocabulary as plain text.
            whole = bytes(value for value in values if value is not None)
            self._pieces[token_id] = (token or "").encode("utf-8", "replace") if None in values else whole
        return self._pieces[token_id]

    def _by_windows(self, token_ids: Sequence[int]) -> list[str]:
        assert self._tokenizer is not None
        texts = []
        for at in range(len(token_ids)):
            before = list(token_ids[max(0, at - WINDOW) : at])
            known = self._tokenizer.decode(before)
            whole = self._tokenizer.decode([*before, token_ids[at]])
            texts.append(whole[len(known.rstrip(REPLACEMENT)) :] if whole.startswith(known.rstrip(REPLACEMENT)) else whole)
        return texts
