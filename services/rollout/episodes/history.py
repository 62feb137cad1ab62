"""Finds the sequence that a request continues: the request repeats its conversation, including our last answer. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_services.rollout.episodes.fingerprints import MessageKey


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The latest state of a sequence: its conversation, including our last answer."""

    path: tuple[MessageKey, ...]
    setting: bytes
    """The sequence's rendering options (``prompt_setting``)."""


class Histories:
    """The conversation of each sequence that can continue: none while it samples, and none of a call that never ended."""

    def __init__(self) -> None:
        self._open: dict[int, Conversation] = {}

    def answered(self, sequence: int, conversation: Conversation) -> None:
        """Note that the sequence now ends with an answer, and can continue."""
        self._open[sequence] = conversation

    def taken(self, sequence: int) -> None:
        """Note that a call continues the sequence, so that no other can continue its earlier state."""
        self._open.pop(sequence, None)

    def continued(self, keys: Sequence[MessageKey], setting: bytes) -> list[tuple[int, int]]:
        """Return the sequences that a request continues, with the number of messages in each: longest first, then oldest."""
        found = [
            (sequence, len(conversation.path))
            for sequence, conversation in self._open.items()
            if conversation.setting == setting and _repeats(keys, conversation.path)
        ]
        return sorted(found, key=lambda match: (-match[1], match[0]))


def _repeats(keys: Sequence[MessageKey], path: Sequence[MessageKey]) -> bool:
    """Return whether a request repeats all of ``path`` and then adds something new."""
    return len(keys) > len(path) and all(key.repeats(known) for key, known in zip(keys, path, strict=False))
