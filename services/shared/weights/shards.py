"""Cuts an engine's parameters into the shards of its ranks, as SGLang 0.5.23 does for the classes that ``spread`` knows.

``gspo_services.shared.weights.engine_parameters`` says which tensors make a parameter. Of these tensors tensor rank r of
n has:

    self_attn.qkv_proj               the r-th part of the rows of each of q, k, v; where ranks are more than heads of keys,
                                     one such head, which several ranks share
    self_attn.q_b_proj, kv_b_proj    the r-th part of the rows, which are by heads
    self_attn.o_proj, mlp.down_proj  the r-th part of the columns; a bias whole
    mlp.gate_up_proj                 the r-th part of the rows of each of gate, up; of shared experts, too
    experts.w13_weight               of each of its experts: part of the rows of each of gate, up
    experts.w2_weight                of each of its experts: part of the columns
    embed_tokens, lm_head            the r-th part of the rows, after zero rows up to a multiple of 64
    norms, routers, and the latent projections before norms    everything

A parameter with another name is refused: a shard that nobody can compute cannot be verified.
"""

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, overload

import numpy as np

from gspo_protocol.messages import TensorInfo
from gspo_services.shared.weights.checksums import Hash, hash_function
from gspo_services.shared.weights.engine_parameters import (
    Buffer,
    Described,
    Layout,
    Matrix,
    described,
    is_vocabulary,
    layouts_of,
    transposed,
)
from gspo_services.shared.weights.spread import Spread, SpreadError

_BY_ROWS: Final = re.compile(r".*\.(self_attn\.(qkv|q|q_b|kv_b)_proj|(mlp|shared_experts)\.gate_up_proj)\.(weight|bias)")
_BY_COLUMNS: Final = re.compile(r".*\.(self_attn\.o_proj|(mlp|shared_experts)\.down_proj)\.weight")
_WHOLE: Final = re.compile(
    r"model\.norm\.weight|.*\.(\w+_layernorm|[qk]_norm|(mlp|block_sparse_moe)\.gate)\.weight|.*\.(o|down)_proj\.bias|"
    r".*\.self_attn\.(fused_qkv_a_proj_with_mqa|kv_a_proj_with_mqa)\.weight|.*\.mlp\.gate\.e_score_correction_bias"
)
_KEYS_OR_VALUES: Final = re.compile(r".*\.[kv]_proj\.(weight|bias)")
_Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    """A rectangle of one tensor, which lies row by row in a shard from byte ``begin`` on."""

    tensor: int
    """The tensor's index among those that were sent."""
    begin: int
    row_bytes: int
    """Of the whole tensor."""
    rows: _Range
    columns: _Range
    """In bytes of a row."""
    matrix: Matrix | None = None
    """Of the whole tensor, where the shard has each of its matrices transposed."""

    @property
    def num_bytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    @property
    def is_run(self) -> bool:
        """Whether its bytes are also contiguous in the tensor."""
        return self.columns == (0, self.row_bytes)

    def of(self, data: Buffer) -> Buffer:
        """Return its bytes, from the tensor's; a copy only if columns are cut."""
        if self.is_run:
            return memoryview(data)[self.rows[0] * self.row_bytes : self.rows[1] * self.row_bytes]
        table = np.frombuffer(data, dtype=np.uint8).reshape(-1, self.row_bytes)
        return np.ascontiguousarray(table[slice(*self.rows), slice(*self.columns)]).data.cast("B")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part of a parameter: ``pieces``, in its order, then zeros."""

    name: str
    pieces: tuple[ShardPiece, ...]
    padding_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces) + self.padding_bytes


class ShardBytes(Sequence[Buffer]):
    """A shard's bytes in pieces. Cut columns are copied when they are read, one piece at a time."""

    def __init__(self, shard: Shard, data: Sequence[Buffer]) -> None:
        """``data``: the bytes of all tensors that were sent."""
        self._shard = shard
        self._data = data

    def __len__(self) -> int:
        return len(self._shard.pieces) + 1

    @overload
    def __getitem__(self, place: int) -> Buffer: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Buffer]: ...
    def __getitem__(self, place: int | slice) -> Buffer | Sequence[Buffer]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if place == len(self._shard.pieces):
            return bytes(self._shard.padding_bytes)
        piece = self._shard.pieces[place]
        data = piece.of(self._data[piece.tensor])
        return data if piece.matrix is None else transposed(data, piece.matrix)


def shards(tensors: Sequence[TensorInfo], spread: Spread, kv_heads: int) -> list[dict[str, Shard]]:
    """Return for each tensor rank the shards of all parameters that were sent whole, by name; do not change them.

    ``kv_heads``: heads of keys and values; it does not matter for one rank. Raises: SpreadError if it is unknown how a
    parameter is cut; ValueError for a tensor sent twice.
    """
    return _shards(described(tensors), spread, kv_heads)


@lru_cache(maxsize=2)
def _shards(tensors: tuple[Described, ...], spread: Spread, kv_heads: int) -> list[dict[str, Shard]]:
    complete = [each for each in layouts_of(tensors).values() if each.complete]
    return [
        {each.name: _shard(each, _Cut(tensors=tensors, spread=spread, kv_heads=kv_heads, rank=rank)) for each in complete}
        for rank in range(spread.tensor)
    ]


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """One tensor rank's view of the tensors that were sent."""

    tensors: tuple[Described, ...]
    spread: Spread
    kv_heads: int
    rank: int

    def rows(self, index: int, part: int, parts: int) -> tuple[int, _Range, _Range]:
        """Return a tensor's index, and its ``part``-th rows of ``parts``."""
        rows, row_bytes = self._size(index)
        return index, _part(rows, part, parts, self.tensors[index][0]), (0, row_bytes)

    def columns(self, index: int, part: int, parts: int) -> tuple[int, _Range, _Range]:
        """Return a tensor's index, and its ``part``-th columns of ``parts``."""
        rows, row_bytes = self._size(index)
        return index, (0, rows), _part(row_bytes, part, parts, self.tensors[index][0])

    def whole(self, index: int) -> tuple[int, _Range, _Range]:
        return self.rows(index, 0, 1)

    def experts(self, indices: Sequence[int]) -> Sequence[int]:
        """Of the places of tensors of all experts, in their order, those of this rank's."""
        begin, end = _part(len(indices), self.spread.expert_group(self.rank), self.spread.expert, "the experts")
        return indices[begin:end]

    def shard(
        self,
        name: str,
        rectangles: Iterable[tuple[int, _Range, _Range]],
        padding_bytes: int = 0,
        matrix: Matrix | None = None,
    ) -> Shard:
        pieces: list[ShardPiece] = []
        begin = 0
        for index, rows, columns in rectangles:
            _, row_bytes = self._size(index)
            pieces.append(
                ShardPiece(tensor=index, begin=begin, row_bytes=row_bytes, rows=rows, columns=columns, matrix=matrix)
            )
            begin += pieces[-1].num_bytes
        return Shard(name=name, pieces=tuple(pieces), padding_bytes=padding_bytes)

    def _size(self, index: int) -> tuple[int, int]:
        """Return the rows of a tensor, and the bytes of one; a single number counts as one row."""
        _, shape, num_bytes = self.tensors[index]
        return (shape[0], num_bytes // shape[0]) if shape and shape[0] else (1, num_bytes)


def _shard(layout: Layout, cut: _Cut) -> Shard:
    """Raises: SpreadError."""
    name, indices, rank, ranks = layout.name, layout.indices, cut.rank, cut.spread.tensor
    if cut.spread.is_whole:
        return cut.shard(name, [cut.whole(index) for index in indices], layout.padding_bytes, layout.matrix)
    if is_vocabulary(name):
        return _vocabulary(layout, cut)
    group, in_group = ranks // cut.spread.expert, cut.spread.rank_in_group(rank)
    if name.endswith(".experts.w13_weight"):
        return cut.shard(name, [cut.rows(index, in_group, group) for index in cut.experts(indices)])
    if name.endswith(".experts.w2_weight"):
        return cut.shard(name, [cut.columns(index, in_group, group) for index in cut.experts(indices)])
    if _BY_ROWS.fullmatch(name):
        # Several ranks share a head of keys where there are more ranks than heads.
        parts = [min(ranks, cut.kv_heads) if _KEYS_OR_VALUES.fullmatch(tensor) else ranks for tensor in layout.tensors]
        return cut.shard(name, [cut.rows(at, rank * num // ranks, num) for at, num in zip(indices, parts, strict=True)])
    if _BY_COLUMNS.fullmatch(name):
        return cut.shard(name, [cut.columns(indices[0], rank, ranks)])
    if _WHOLE.fullmatch(name):
        return cut.shard(name, [cut.whole(index) for index in indices])
    raise SpreadError(
        f"{name}: it is not known how SGLang cuts this parameter over {ranks} ranks, so its shards cannot be verified; use "
        "rollout.tensor_parallel = 1, and more rollouts"
    )


def _vocabulary(layout: Layout, cut: _Cut) -> Shard:
    _, (rows, *_), num_bytes = cut.tensors[layout.indices[0]]
    row_bytes = num_bytes // rows
    begin, end = _part(rows + layout.padding_bytes // row_bytes, cut.rank, cut.spread.tensor, layout.name)
    here = (min(begin, rows), min(end, rows))
    missing = end - begin - (here[1] - here[0])
    return cut.shard(layout.name, [(layout.indices[0], here, (0, row_bytes))], missing * row_bytes)


def _part(size: int, part: int, parts: int, what: str) -> _Range:
    """Return a part. Raises: SpreadError when ``size`` is not a multiple of ``parts``."""
    if size % parts:
        raise SpreadError(f"{what} has {size} parts to share, which {parts} ranks do not divide: use fewer ranks")
    return size // parts * part, size // parts * (part + 1)


class ShardChecksums:
    """The checksums of all ranks' shards of a version. Only shards of tensors that have changed are hashed again."""

    def __init__(self) -> None:
        # By rank and parameter: the hash, the ranks, the tensors' digests, the checksum.
        self._known: dict[tuple[int, str], tuple[Hash, Spread, list[str], str]] = {}

    def of(
        self, sent: Sequence[tuple[TensorInfo, Buffer]], spread: Spread, kv_heads: int, name: Hash
    ) -> list[dict[str, str]]:
        """Return the checksums for each tensor rank, by parameter. Tensors with the same digest have the same bytes.

        Raises: SpreadError, ValueError as ``shards``.
        """
        infos, data = [info for info, _ in sent], [each for _, each in sent]
        ranks = shards(infos, spread, kv_heads)
        checksum = hash_function(name)

        def found(at: tuple[int, str]) -> str:
            rank, parameter = at
            shard = ranks[rank][parameter]
            digests = [infos[piece.tensor].digest for piece in shard.pieces]
            known = self._known.get(at)
            if known is None or known[:3] != (name, spread, digests):
                known = self._known[at] = (name, spread, digests, checksum(ShardBytes(shard, data)))
            return known[3]

        wanted = [(rank, parameter) for rank, each in enumerate(ranks) for parameter in each]
        # The hashes release the interpreter lock.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            checksums = dict(zip(wanted, pool.map(found, wanted), strict=True))
        return [{parameter: checksums[rank, parameter] for parameter in each} for rank, each in enumerate(ranks)]
