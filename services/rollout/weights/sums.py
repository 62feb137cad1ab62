"""Compares an engine's parameters with the published version by sums of tiles, which the engine's ranks report.

Each rank sums what it has of the version's tensors (gspo_services.shared.sglang_sums). What all ranks have adds up to the
sums of whole tensors, over which the learner's digests are: no byte of the version is read here. Only where something
differs, the bytes say which rank has what.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gspo_protocol.digests import sums_digest
from gspo_protocol.messages import TensorInfo
from gspo_protocol.tiles import TILE_BYTES, Sums, num_tiles, tile_sums
from gspo_services.rollout.sglang import RankChecksums, RankSums
from gspo_services.rollout.weights.verification import Verification, joined, tied_head
from gspo_services.shared.weights import (
    HEAD,
    Buffer,
    PlacedParameter,
    Shard,
    ShardPiece,
    answer_file,
    layouts,
    places_file,
    sums_file,
)

PieceSums = list[tuple[ShardPiece, Sums]]
Former = tuple[Sequence[Mapping[str, Shard]], Sequence[RankSums]]
"""The ranks' shards, and what the ranks reported of them."""
Rectangle = tuple[int, tuple[int, int], tuple[int, int]]
"""A tensor's index, rows, and columns in bytes."""


@dataclass(frozen=True, kw_only=True)
class Summed:
    """What an engine must have: ``sent``, each rank its ``shards`` of it."""

    sent: Sequence[tuple[TensorInfo, Buffer]]
    shards: Sequence[Mapping[str, Shard]]

    def write_places(self, directory: Path) -> None:
        """Write what each rank is to sum. Raises: OSError."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for rank, parameters in enumerate(self.shards):
            placed = {name: _placed(shard) for name, shard in parameters.items()}
            (directory / places_file(rank)).write_bytes(msgspec.msgpack.encode(placed))

    def drop_answers(self, directory: Path) -> None:
        """Remove what was answered before. Raises: OSError."""
        for rank in range(len(self.shards)):
            for name in (answer_file(rank), sums_file(rank)):
                (directory / name).unlink(missing_ok=True)


def compare_sums(expected: Summed, reported: Sequence[RankSums], former: Former | None = None) -> Verification:
    """Compare what each rank reports. ``former``: what each had before, to say so; None: unknown."""
    ranks = [_Rank(rank, shards, each) for rank, (shards, each) in enumerate(zip(expected.shards, reported, strict=True))]
    infos = [info for info, _ in expected.sent]
    parameters = layouts(infos)
    tied = tied_head({info.name: info.digest for info in infos})
    unverified = [name for each in parameters.values() if not each.complete for name in each.tensors]
    wrong = _wrong_tensors(infos, ranks)
    found: list[Verification] = []
    for rank in ranks:
        mismatched = {name for name in rank.shards if name in rank.sizes and name not in rank.pieces}
        mismatched |= rank.padded_wrongly | _suspects(rank, wrong, expected, alone=len(ranks) == 1)
        absent = [name for name, each in parameters.items() if each.complete and name not in rank.sizes]
        prefix = f"{rank.label}: " if len(ranks) > 1 else ""
        found.append(
            Verification(
                mismatched=[f"{prefix}{name}{_whose(rank, name, ranks, expected, former)}" for name in sorted(mismatched)],
                missing=[
                    prefix + each
                    for name in absent
                    if not name.endswith(HEAD) or not tied
                    for each in parameters[name].tensors
                ],
                unsent=[prefix + name for name in rank.sizes if name not in parameters],
                unverified=unverified,
            )
        )
    if wrong and not any(each.mismatched for each in found):
        # Each rank has the bytes that came, and these are no longer those of the version.
        names = [infos[index].name for index in sorted(wrong)]
        found.append(Verification(mismatched=names, unverified=unverified))
    return joined(found)


class _Rank:
    """What a rank has reported, by the pieces of its parameters."""

    def __init__(self, rank: int, shards: Mapping[str, Shard], reported: RankSums) -> None:
        self.label = RankChecksums(checksums={}, rank=rank).label
        self.shards = shards
        self.sizes = reported.sizes
        self.pieces: dict[str, PieceSums] = {}
        """Of parameters that are as large as they should be."""
        self.padded_wrongly: set[str] = set()
        begin = 0
        for name, shard in shards.items():
            if self.sizes.get(name) != shard.num_bytes:
                continue
            self.pieces[name] = []
            for piece in shard.pieces:
                end = begin + _num_tiles(piece)
                self.pieces[name].append((piece, reported.sums[begin:end]))
                begin = end
            end = begin + num_tiles(shard.padding_bytes)
            if reported.sums[begin:end].any():
                self.padded_wrongly.add(name)
            begin = end


def _wrong_tensors(infos: Sequence[TensorInfo], ranks: Sequence[_Rank]) -> set[int]:
    """Tensors of which the ranks' parts do not add up to the digest, or of which two ranks have one part differently."""
    known: dict[Rectangle, tuple[ShardPiece, Sums]] = {}
    wrong: set[int] = set()
    for rank in ranks:
        for pieces in rank.pieces.values():
            for piece, sums in pieces:
                _, first = known.setdefault((piece.tensor, piece.rows, piece.columns), (piece, sums))
                if first is not sums and not np.array_equal(first, sums):
                    wrong.add(piece.tensor)
    rows: dict[int, Sums] = {}
    for piece, sums in known.values():
        size = num_tiles(infos[piece.tensor].num_bytes)
        if piece.tensor not in rows:
            rows[piece.tensor] = sums if len(sums) == size else np.zeros(size, dtype=np.uint64)
            if len(sums) == size:
                continue
        begin = piece.rows[0] * piece.row_bytes // TILE_BYTES
        # Not in place: the row may be what a rank has reported.
        row = rows[piece.tensor] = rows[piece.tensor].copy()
        row[begin : begin + len(sums)] += sums
    return wrong | {
        tensor for tensor, row in rows.items() if sums_digest(row, infos[tensor].num_bytes) != infos[tensor].digest
    }


def _suspects(rank: _Rank, wrong: set[int], expected: Summed, *, alone: bool) -> set[str]:
    """The rank's parameters with parts of wrong tensors: all, or those that differ from what came."""
    touched = {name: each for name, each in rank.pieces.items() if any(piece.tensor in wrong for piece, _ in each)}
    return set(touched) if alone else {name for name, each in touched.items() if not _is_right(each, expected)}


def _is_right(pieces: PieceSums, expected: Summed) -> bool:
    return all(np.array_equal(sums, _of_bytes(piece, piece, expected)) for piece, sums in pieces)


def _whose(rank: _Rank, name: str, ranks: Sequence[_Rank], expected: Summed, former: Former | None) -> str:
    """Identify a wrong shard, where possible."""
    own = rank.pieces.get(name)
    if own is None or len(ranks) == 1:
        return ""
    for other in ranks:
        theirs = [piece for piece, _ in other.pieces.get(name, [])]
        if other is not rank and [piece.num_bytes for piece in theirs] == [piece.num_bytes for piece, _ in own]:
            pairs = zip(own, theirs, strict=True)
            if all(np.array_equal(sums, _of_bytes(piece, their, expected)) for (piece, sums), their in pairs):
                return f" (it has the shard of {other.label})"
    place = next(at for at, each in enumerate(ranks) if each is rank)
    if former is not None and place < len(former[0]):
        # Only here: it takes a while, and seldom does anything differ.
        before = _Rank(place, former[0][place], former[1][place]).pieces.get(name)
        if before is not None and np.array_equal(_row(before), _row(own)):
            return " (it has the shard of the version before)"
    return ""


def _of_bytes(place: ShardPiece, source: ShardPiece, expected: Summed) -> Sums:
    """The sums of the bytes of ``source`` at the place of another piece of the same size."""
    if not place.num_bytes:
        return np.empty(0, dtype=np.uint64)
    width = place.columns[1] - place.columns[0]
    data = np.frombuffer(source.of(expected.sent[source.tensor][1]), dtype=np.uint8).reshape(-1, width)
    lead = place.rows[0] * place.row_bytes % TILE_BYTES
    widened = np.zeros(lead + len(data) * place.row_bytes, dtype=np.uint8)
    widened[lead:].reshape(-1, place.row_bytes)[:, slice(*place.columns)] = data
    return tile_sums(widened.data)


def _row(pieces: PieceSums) -> Sums:
    return np.concatenate([sums for _, sums in pieces]) if pieces else np.empty(0, dtype=np.uint64)


def _num_tiles(piece: ShardPiece) -> int:
    """How many tiles a piece touches, from that of its first row to that of its last."""
    return (
        num_tiles(piece.rows[1] * piece.row_bytes) - piece.rows[0] * piece.row_bytes // TILE_BYTES if piece.num_bytes else 0
    )


def _placed(shard: Shard) -> PlacedParameter:
    rectangles = [(piece.row_bytes, *piece.rows, *piece.columns) for piece in shard.pieces]
    is_transposed = any(piece.matrix for piece in shard.pieces)
    return PlacedParameter(num_bytes=shard.num_bytes, rectangles=rectangles, transposed=is_transposed)
