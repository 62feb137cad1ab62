"""The keys of running episodes."""

import secrets
from collections import OrderedDict
from typing import Final

from gspo_services.rollout.endpoint import CallRefused, Calls

KEY_BYTES: Final = 32
ENDED_KEPT: Final = 4096
"""How many ended episodes' keys are still distinguished from unknown ones."""


class EpisodeRegistry:
    """Maps keys to episodes, for the endpoint."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._calls: dict[str, Calls] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def add(self, calls: Calls) -> str:
        """Return the key of a new episode; a resumed episode gets a new one."""
        key = secrets.token_urlsafe(KEY_BYTES)
        self._calls[key] = calls
        return key

    def remove(self, key: str) -> None:
        """Remove an episode that has ended here. A second call does nothing."""
        if self._calls.pop(key, None) is not None:
            self._ended[key] = None
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)

    def calls_of(self, key: str) -> Calls:
        """See ``Episodes.calls_of``. Raises: CallRefused."""
        calls = self._calls.get(key)
        if calls is not None:
            return calls
        if key in self._ended:
            raise CallRefused(410, "episode_ended", ENDED)
        raise CallRefused(401, "unknown_key", "no episode has this key: use episode.api_key, only while the episode runs")


ENDED: Final = "this episode has ended, and tokens sampled now would not be trained on. Do not call after returning"
