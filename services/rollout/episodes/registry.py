"""The keys of running episodes."""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from gspo_services.rollout.endpoint import CallRefused, Calls
from gspo_services.rollout.episodes.roles import InRole, WithoutRole
from gspo_services.shared.runtime.plain_text import one_line

KEY_BYTES: Final = 32
ENDED_KEPT: Final = 4096
"""How many ended episodes' keys are still distinguished from unknown ones."""


class EpisodeRegistry:
    """Maps keys to episodes, for the endpoint. The key of a role is the episode's, a point, and the role's name."""

    def __init__(self, model: str, roles: Sequence[str] = ()) -> None:
        """``roles``: that the policy plays in each episode; none for one."""
        self.model = model
        self.roles = roles
        self._calls: dict[str, Calls] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def add(self, calls: Calls) -> str:
        """Return the key of a new episode; a resumed episode gets a new one."""
        key = secrets.token_urlsafe(KEY_BYTES)
        self._calls[key] = WithoutRole(calls, self.roles) if self.roles else calls
        for place, name in enumerate(self.roles):
            self._calls[f"{key}.{name}"] = InRole(calls, place)
        return key

    def remove(self, key: str) -> None:
        """Remove an episode that has ended here. A second call does nothing."""
        for name in self.roles:
            self._calls.pop(f"{key}.{name}", None)
        if self._calls.pop(key, None) is not None:
            self._ended[key] = None
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)

    def calls_of(self, key: str) -> Calls:
        """See ``Episodes.calls_of``. Raises: CallRefused."""
        calls = self._calls.get(key)
        if calls is not None:
            return calls
        episode, _, role = key.partition(".")
        if episode in self._ended:
            raise CallRefused(410, "episode_ended", ENDED)
        if episode in self._calls:
            known = f"agent.roles are {', '.join(self.roles)}" if self.roles else "agent.roles is empty"
            raise CallRefused(401, "unknown_role", f"no role is called {one_line(role, 40)!r}: {known}")
        raise CallRefused(401, "unknown_key", "no episode has this key: use episode.api_key, only while the episode runs")


ENDED: Final = "this episode has ended, and tokens sampled now would not be trained on. Do not call after returning"
