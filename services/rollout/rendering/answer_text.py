"""Turns an answer's ids into text, for every renderer."""

from collections.abc import Sequence
from typing import Final

from gspo_services.rollout.rendering.interface import Markers
from gspo_services.rollout.tokenizer import ChatTokenizer

PROMPT_TAIL_TOKENS: Final = 16
"""More tokens than any template has between the marker that opens the reasoning and the end of the prompt."""


class AnswerText:
    """Decides which tokens of an answer have text, and whether a prompt has opened the reasoning."""

    def __init__(self, tokenizer: ChatTokenizer, markers: Markers, stop_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.markers = markers
        self.stop_ids = stop_ids
        named = {markers.reasoning_opens, markers.reasoning_closes, *markers.calls_open, *markers.calls_within}
        kept = {tokenizer.token_id(marker) for marker in named if marker}
        self._silent = (tokenizer.hidden_ids - kept) | stop_ids

    def ids(self, sampled_ids: Sequence[int]) -> list[int]:
        """Return the ids before the first stop token, without those that the vocabulary does not have."""
        end = next((index for index, token in enumerate(sampled_ids) if token in self.stop_ids), len(sampled_ids))
        return [token for token in sampled_ids[:end] if 0 <= token < self.tokenizer.vocab_size]

    def has_text(self, token_id: int) -> bool:
        """Return False for stop tokens, and for hidden special tokens that are not markers of the format."""
        return token_id not in self._silent and 0 <= token_id < self.tokenizer.vocab_size

    def text(self, sampled_ids: Sequence[int]) -> str:
        """Return the text of an answer, markers included."""
        return self.tokenizer.decode([token for token in self.ids(sampled_ids) if self.has_text(token)])

    def begins_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the prompt ends with the marker that opens the reasoning."""
        opens = self.markers.reasoning_opens
        return bool(opens) and self.tokenizer.decode(prompt_ids[-PROMPT_TAIL_TOKENS:]).rstrip().endswith(opens)
