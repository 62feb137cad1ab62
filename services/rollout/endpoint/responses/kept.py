"""What an episode's responses ended with, for requests that name one as the previous one."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from gspo_services.rollout.endpoint.calls import CallRefused, Calls

MOST_RESPONSES: Final = 256
"""How many of an episode's newest responses can be continued by their ids."""
MOST_BYTES: Final = 16 * 2**20
"""Bytes of an episode's kept messages, those of several responses counted once; the newest response is always kept."""


class KeptResponses:
    """The conversations of one episode by the ids of its responses. A message that several have is held once."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[str, list[bytes]] = OrderedDict()
        self._messages: dict[bytes, tuple[dict[str, Any], int]] = {}
        self._uses: dict[bytes, int] = {}
        self._num_bytes = 0

    def keep(self, name: str, messages: Sequence[dict[str, Any]]) -> None:
        """Keep the conversation, its answer included, without its instructions."""
        self._drop(name)
        keys = []
        for message in messages:
            encoded = msgspec.json.encode(message)
            key = sha256(encoded).digest()
            keys.append(key)
            if key not in self._messages:
                self._messages[key] = (message, len(encoded))
                self._num_bytes += len(encoded)
            self._uses[key] = self._uses.get(key, 0) + 1
        self._conversations[name] = keys
        while len(self._conversations) > MOST_RESPONSES or (self._num_bytes > MOST_BYTES and len(self._conversations) > 1):
            self._drop(next(iter(self._conversations)))

    def conversation(self, name: str) -> list[dict[str, Any]]:
        """Return what was kept. Raises: CallRefused, status 404."""
        keys = self._conversations.get(name)
        if keys is None:
            text = (
                f"previous_response_id {name[:64]!r} is none of this episode's, or not one of its newest {MOST_RESPONSES} "
                f"(within {MOST_BYTES // 2**20} MiB): give the whole conversation as input"
            )
            raise CallRefused(404, "previous_response_not_found", text, param="previous_response_id")
        return [self._messages[key][0] for key in keys]

    def _drop(self, name: str) -> None:
        for key in self._conversations.pop(name, ()):
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self._num_bytes -= self._messages.pop(key)[1]


class KeptByEpisode:
    """The kept responses of each episode, for as long as its calls can be made."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Calls, KeptResponses] = WeakKeyDictionary()

    def of(self, calls: Calls) -> KeptResponses:
        """Return those of one episode."""
        return self._kept.setdefault(calls, KeptResponses())
