"""Which sequence a request continues: the one whose conversation, with our answer at its end, the request repeats. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_services.rollout.episodes.fingerprints import MessageKey


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The last state of a sequence: what was said in it, our last answer included."""

    path: tuple[MessageKey, ...]
    setting: bytes
    """What the sequence was rendered with (``prompt_setting``)."""


class Histories:
    """The conversation of each sequence that can go on: none while it samples, and none of a call that never ended."""

    def __init__(self) -> None:
        self._open: dict[int, Conversation] = {}

    def answered(self, sequence: int, conversation: Conversation) -> None:
        """The sequence ends with an answer now, and can go on from there."""
        self._open[sequence] = conversation

    def taken(self, sequence: int) -> None:
        """The sequence goes on with a call: nothing else can continue it from its former state."""
        self._open.pop(sequence, None)

    def continued(self, keys: Sequence[MessageKey], setting: bytes) -> list[tuple[int, int]]:
        """Sequences that a request goes on with, and how many of its messages each has: longest first, then oldest."""
        found = [
            (sequence, len(conversation.path))
            for sequence, conversation in self._open.items()
            if conversation.setting == setting and _repeats(keys, conversation.path)
        ]
        return sorted(found, key=lambda match: (-match[1], match[0]))


def _repeats(keys: Sequence[MessageKey], path: Sequence[MessageKey]) -> bool:
    """Return whether a request repeats all of ``path`` and then adds something new."""
    return len(keys) > len(path) and all(key.repeats(known) for key, known in zip(keys, path, strict=False))
