"""Decodes tokens to text one at a time: text is returned once no later token can change it."""

import codecs
from typing import Final

from gspo_services.rollout.rendering.answer_text import AnswerText

REPLACEMENT: Final = "\ufffd"


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet for bytes, in which byte-level vocabularies are written."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


BYTES: Final = byte_of_character()


class TextDecoder:
    """The text of one answer. All of it together is ``AnswerText.text`` of its ids, whatever the ids."""

    def __init__(self, answer: AnswerText) -> None:
        self._answer = answer
        self._ended = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if answer.tokenizer.is_byte_level else None
        # For other vocabularies: tokens not returned yet, after one that was, because a decoder looks at neighbours.
        self._window: list[int] = []
        self._num_shown = 0

    def feed(self, token_id: int) -> str:
        """Add a token; returns the text that is now final, and nothing after a stop token."""
        if token_id in self._answer.stop_ids:
            self._ended = True
        if self._ended or not self._answer.has_text(token_id):
            return ""
        token = self._answer.tokenizer.token(token_id)
        if token is None:
            return ""
        return self._utf8.decode(_bytes(token)) if self._utf8 is not None else self._by_window(token_id, token)

    def finish(self) -> str:
        """Return the text held back: a character that never became complete."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        rest = self._answer.tokenizer.decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        return rest

    def _by_window(self, token_id: int, token: str) -> str:
        self._window.append(token_id)
        # Bytes count together: a wrong one after a whole character makes both of them unreadable.
        if token.startswith("<0x"):
            return ""
        text = self._answer.tokenizer.decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._num_shown :]
        if certain == text:
            self._window = [token_id]
            self._num_shown = len(self._answer.tokenizer.decode(self._window))
        else:
            self._num_shown = max(self._num_shown, len(certain))
        return new


def _bytes(token: str) -> bytes:
    """Return a token's bytes. A token outside the alphabet was added to the vocabulary as plain text."""
    values = [BYTES.get(character) for character in token]
    return token.encode("utf-8", "replace") if None in values else bytes(value for value in values if value is not None)
