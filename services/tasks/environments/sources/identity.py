"""Each task has an identity that does not change: its column for that, or a digest of its content.

The same row again is the same task, also where its answer is spelled otherwise. Two rows that ask the same and answer
otherwise contradict each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from gspo.tasks.environments import Plain, Task
from gspo_services.tasks.environments.sources.columns import column_of

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
MOST_SHOWN = 100


class IdentifiedTask(NamedTuple):
    """A task, and what it is known by in every run and in every file."""

    identity: str
    task: Task


class AnsweredPrompt(NamedTuple):
    """What a task asks, and the answer."""

    prompt: bytes
    """Its digest."""
    answer: Plain


def digest_of(content: object) -> bytes:
    """16 bytes that are the same for the same plain value."""
    return hashlib.blake2b(_ENCODER.encode(content), digest_size=16).digest()


def row_key(record: object) -> int | None:
    """A number that is the same for the same row of a file, before it is read; None for a row that cannot be encoded."""
    try:
        content = record if isinstance(record, bytes) else _ENCODER.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def identity_of(record: dict[str, Any], content: bytes, id_column: str) -> str:
    """The text of ``id_column``; without one 32 hexadecimal characters, the digest ``content`` of the task.

    Raises: ValueError for a column that is no text or number, or is empty.
    """
    if not id_column:
        return content.hex()
    value = column_of(record, id_column, "id_column says")
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f'column "{id_column}" is {repr(value)[:100]}: an identity is text or a whole number')
    return str(value).strip()


def without_place(task: Task) -> object:
    """The content of a task whose "place" says where its row is."""
    return {key: value for key, value in task.items() if key != "place"}


class KnownTasks:
    """Where each task, and each question with its answer, was seen first."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[str, bytes]] = {}
        self._answers: dict[bytes, tuple[str, Plain]] = {}

    def agreed(self, task: Task, same: Callable[[Plain, Plain], bool]) -> tuple[Task, AnsweredPrompt]:
        """``task`` with its answer as the first row that asked this spells it, and what that makes of it, for ``is_new``.
        ``same`` is asked only where the spellings differ.

        Raises: ValueError that names both places, for an answer that is not the ``same``.
        """
        prompt, answer = digest_of(task["prompt"]), task["answer"]
        where, first = self._answers.get(prompt, ("", answer))
        if first != answer:
            if not same(first, answer):
                raise ValueError(
                    f"its answer is {_shown(answer)}, and the row at {where} asks the same and answers {_shown(first)}: "
                    "correct or remove one of them"
                )
            task = task | {"answer": first}
        return task, AnsweredPrompt(prompt, first)

    def is_new(self, identity: str, content: bytes, question: AnsweredPrompt | None, where: str) -> bool:
        """Note a task that is at ``where``; False when it is there already.

        Raises: ValueError that names both places, for another task of the same identity. Nothing is noted then.
        """
        first = self._tasks.get(identity)
        if first is not None:
            if first[1] != content:
                raise ValueError(
                    f'it has the identity "{identity[:100]}" of the task at {first[0]}, which is another: remove one'
                )
            return False
        if question is not None:
            self._answers.setdefault(question.prompt, (where, question.answer))
        self._tasks[identity] = (where, content)
        return True

    def mark(self) -> tuple[int, int]:
        """How much is known, for ``back_to``."""
        return len(self._tasks), len(self._answers)

    def back_to(self, mark: tuple[int, int]) -> None:
        """Forget what was noted since ``mark``: those tasks are not used after all."""
        num_tasks, num_answers = mark
        while len(self._tasks) > num_tasks:
            self._tasks.popitem()
        while len(self._answers) > num_answers:
            self._answers.popitem()

    def digest(self) -> str:
        """Of all identities, in their order; 32 hexadecimal characters."""
        digest = hashlib.blake2b(digest_size=16)
        for identity in self._tasks:
            digest.update(len(identity).to_bytes(4, "big") + identity.encode())
        return digest.hexdigest()


def _shown(answer: object) -> str:
    text = repr(answer)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
