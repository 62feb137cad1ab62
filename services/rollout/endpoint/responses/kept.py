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
"""Of memory for an episode's kept messages, those of several responses counted once; the newest response is always kept."""
MESSAGE_BYTES: Final = 512
"""Of a message besides its JSON: its key and its places in the tables. Measured, rounded up."""
PLACE_BYTES: Final = 16
"""Of a message's place in a conversation: a list grows in steps."""


class KeptResponses:
    """The conversations of one episode by the ids of its responses. A message that several have is held once, as JSON,
    whose size is known: as objects it would take many times as much."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[str, list[bytes]] = OrderedDict()
        self._messages: dict[bytes, bytes] = {}
        self._keys: dict[bytes, bytes] = {}
        """Each key itself, so that conversations share it."""
        self._uses: dict[bytes, int] = {}
        self.num_bytes = 0
        """What it holds."""

    def keep(self, name: str, messages: Sequence[dict[str, Any]]) -> None:
        """Keep the conversation, its answer included, without its instructions."""
        self._drop(name)
        keys = []
        for message in messages:
            encoded = msgspec.json.encode(message)
            key = sha256(encoded).digest()
            key = self._keys.setdefault(key, key)
            keys.append(key)
            if key not in self._messages:
                self._messages[key] = bytes(memoryview(encoded))  # Of its own length: the encoder's buffer is larger.
                self.num_bytes += len(encoded) + MESSAGE_BYTES
            self._uses[key] = self._uses.get(key, 0) + 1
        self.num_bytes += PLACE_BYTES * len(keys)
        self._conversations[name] = keys
        while len(self._conversations) > MOST_RESPONSES or (self.num_bytes > MOST_BYTES and len(self._conversations) > 1):
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
        return [msgspec.json.decode(self._messages[key]) for key in keys]

    def _drop(self, name: str) -> None:
        keys = self._conversations.pop(name, ())
        self.num_bytes -= PLACE_BYTES * len(keys)
        for key in keys:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key], self._keys[key]
                self.num_bytes -= len(self._messages.pop(key)) + MESSAGE_BYTES


class KeptByEpisode:
    """The kept responses of each episode, for as long as its calls can be made."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Calls, KeptResponses] = WeakKeyDictionary()

    def of(self, calls: Calls) -> KeptResponses:
        """Return those of one episode."""
        return self._kept.setdefault(calls, KeptResponses())
