"""Each task has an identity that does not change: its column for that, or a digest of its content."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from gspo.tasks.environments import Task
from gspo_services.tasks.environments.sources.columns import column_of

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


class IdentifiedTask(NamedTuple):
    """A task, and what it is known by in every run and in every file."""

    identity: str
    task: Task


def identity_of(record: dict[str, Any], content: object, id_column: str) -> str:
    """The text of ``id_column``; without one 32 hexadecimal characters of ``content``, the task's.

    Raises: ValueError for a column that is no text or number, or is empty.
    """
    if not id_column:
        return hashlib.blake2b(_ENCODER.encode(content), digest_size=16).hexdigest()
    value = column_of(record, id_column, "id_column says")
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f'column "{id_column}" is {repr(value)[:100]}: an identity is text or a whole number')
    return str(value).strip()


def without_place(task: Task) -> object:
    """The content of a task whose "place" says where its row is."""
    return {key: value for key, value in task.items() if key != "place"}


class Identities:
    """Where each identity was seen first: two tasks with one identity are one task, and would be counted as two."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._places)

    def require_new(self, identity: str, where: str) -> None:
        """Note that ``identity`` is at ``where``. Raises: ValueError that names both places."""
        first = self._places.setdefault(identity, where)
        if first != where:
            raise ValueError(f'it has the identity "{identity[:100]}" of the task at {first}: remove one of them')

    def forget(self, identities: list[str]) -> None:
        """Tasks that were read and are not used after all."""
        for identity in identities:
            self._places.pop(identity, None)

    def digest(self) -> str:
        """Of all identities, in their order; 32 hexadecimal characters."""
        digest = hashlib.blake2b(digest_size=16)
        for identity in self._places:
            digest.update(len(identity).to_bytes(4, "big") + identity.encode())
        return digest.hexdigest()
