"""A conversation as the model reads it, and why it cannot be read or scored. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Encoded(NamedTuple):
    """One conversation as the model reads it."""

    ids: list[int]
    types: list[int]
    """The text to which each token belongs, for models that tell question and answer apart; else empty."""
    is_cut: bool


class NoMemoryError(RuntimeError):
    """The device has no room for a batch."""


class UnreadableConversationError(Exception):
    """The model cannot read a conversation."""

    def __init__(self, reason: Literal["bad_job", "too_large"], text: str) -> None:
        super().__init__(text)
        self.reason = reason
