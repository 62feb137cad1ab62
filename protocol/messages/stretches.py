"""Which chunks of a message follow one another, found with a few array operations for all of them."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Column = np.ndarray[Any, Any]


class Stretch(NamedTuple):
    """Chunks of one trajectory that follow one another. ``is_usual``: all are more tokens of one action, with nothing else,
    by versions that do not go back; otherwise it is one chunk of any kind, and what follows ``is_usual`` is not known.
    """

    places: tuple[int, ...]
    trajectory_id: int
    epoch: int
    offset: int
    num_tokens: int
    is_usual: bool
    turn: int = 0
    versions: tuple[tuple[int, int], ...] = ()
    """Each version with its number of tokens."""
    version_sum: int = 0
    """Sum over the tokens of the version that made them."""
    largest_token_id: int = 0
    has_state: bool = False
    """An empty one."""
    turn_done: bool = False


class StretchColumns(NamedTuple):
    """Stretches as arrays, one value for each."""

    trajectory_id: Column
    epoch: Column
    offset: Column
    num_tokens: Column
    is_usual: Column
    turn: Column
    """This and the following fields are unknown where ``is_usual`` is False; see ``Stretch``."""
    oldest: Column
    """The version of its first token."""
    newest: Column
    """The version of its last token."""
    num_versions: Column
    version_sum: Column
    largest_token_id: Column
    is_only: Column
    """Whether no other stretch of the message is of its trajectory; always known."""

    def only(self, place: int) -> "StretchColumns":
        """One stretch by itself."""
        return StretchColumns(*(each[place : place + 1] for each in self))._replace(is_only=np.ones(1, bool))


class ChunkColumns(NamedTuple):
    """Chunks as arrays, one value for each. What a chunk that is not usual has from ``turn`` on does not matter."""

    trajectory_id: Column
    epoch: Column
    offset: Column
    num_tokens: Column
    is_usual: Column
    """Whether it is more tokens of one action, by one version, with nothing else."""
    turn: Column
    version: Column
    largest_token_id: Column
    state_bytes: Column
    turn_done: Column


def find_stretches(chunks: ChunkColumns) -> tuple[list[Stretch], StretchColumns]:
    """Return all chunks, each in one stretch, in the order of their first ones; the same as arrays."""
    order = np.lexsort((chunks.epoch, chunks.trajectory_id))
    each = ChunkColumns(*(column[order] for column in chunks))
    usual, trajectory, version, tokens = each.is_usual, each.trajectory_id, each.version, each.num_tokens
    goes_on = (
        usual[1:] & usual[:-1] & (trajectory[1:] == trajectory[:-1]) & (each.epoch[1:] == each.epoch[:-1])
        & (each.turn[1:] == each.turn[:-1]) & (each.offset[1:] == each.offset[:-1] + tokens[:-1])
        & (version[1:] >= version[:-1])
    )  # fmt: skip
    begins = np.flatnonzero(np.append(True, ~goes_on))
    in_order = np.argsort(order[begins])
    first, last = begins[in_order], (np.append(begins[1:], len(order)) - 1)[in_order]
    changes = np.append(False, version[1:] != version[:-1])
    changes[begins] = True
    again = trajectory[begins][1:] == trajectory[begins][:-1]
    found = StretchColumns(
        trajectory_id=trajectory[first],
        epoch=each.epoch[first],
        offset=each.offset[first],
        num_tokens=np.add.reduceat(tokens, begins)[in_order],
        is_usual=usual[first],
        turn=each.turn[first],
        oldest=version[first],
        newest=version[last],
        num_versions=np.add.reduceat(changes, begins, dtype=np.int64)[in_order],
        # What is not usual may have any version, also one that this overflows with: nobody reads it there.
        version_sum=np.add.reduceat(version * tokens, begins)[in_order],
        largest_token_id=np.maximum.reduceat(each.largest_token_id, begins)[in_order],
        is_only=~(np.append(again, False) | np.append(False, again))[in_order],
    )
    ordered = _Ordered(order, version, tokens, first, last + 1)
    stretches = zip(
        ordered.places(),
        found.trajectory_id.tolist(),
        found.epoch.tolist(),
        found.offset.tolist(),
        found.num_tokens.tolist(),
        found.is_usual.tolist(),
        found.turn.tolist(),
        ordered.versions(found),
        found.version_sum.tolist(),
        found.largest_token_id.tolist(),
        (np.maximum.reduceat(each.state_bytes, begins) > 0)[in_order].tolist(),
        (each.turn_done[last] > 0).tolist(),
        strict=True,
    )
    # ``Stretch._make`` is a function of Python's own, which costs more than all else that is done with one.
    return list(map(partial(tuple.__new__, Stretch), stretches)), found


class _Ordered(NamedTuple):
    """All chunks, those of one trajectory in a row, and where each stretch begins and ends among them."""

    place: Column
    version: Column
    num_tokens: Column
    begins: Column
    ends: Column

    def places(self) -> list[tuple[int, ...]]:
        """By stretch: the places of its chunks."""
        if len(self.begins) == len(self.place):
            return list(zip(self.place[self.begins].tolist(), strict=True))
        places = tuple(self.place.tolist())
        return [places[begin:end] for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True)]

    def versions(self, stretches: StretchColumns) -> list[tuple[tuple[int, int], ...]]:
        """By stretch: each version with its number of tokens. Nearly all are of one version."""
        alone = zip(stretches.oldest.tolist(), stretches.num_tokens.tolist(), strict=True)
        versions: list[tuple[tuple[int, int], ...]] = list(zip(alone, strict=True))
        for place in np.flatnonzero(stretches.num_versions > 1).tolist():
            which = slice(int(self.begins[place]), int(self.ends[place]))
            versions[place] = _merged(zip(self.version[which].tolist(), self.num_tokens[which].tolist(), strict=True))
        return versions


def _merged(versions: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours of the same version as one."""
    merged: list[tuple[int, int]] = []
    for version, num_tokens in versions:
        if merged and merged[-1][0] == version:
            num_tokens += merged.pop()[1]
        merged.append((version, num_tokens))
    return tuple(merged)
