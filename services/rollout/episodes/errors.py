"""How an agent's episode fails for a reason of its own."""

from typing import Literal


class EpisodeBroken(RuntimeError):
    """The episode cannot continue; its lease is released as failed, with this text."""

    def __init__(self, text: str, *, outcome: Literal["failed", "diverged"] = "failed") -> None:
        """``outcome`` is how it is counted."""
        super().__init__(text)
        self.outcome: Literal["failed", "diverged"] = outcome
