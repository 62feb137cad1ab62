"""One archive file: the tokens of groups that are out of play, as Parquet with a row for each trajectory.

docs/guide/operations.md lists the columns. ``chunks`` says how a trajectory was streamed and has each chunk's checksum, so
what is read here is, byte for byte, what was acknowledged. pyarrow is imported where it is needed: it takes 35 MiB.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from gspo.files import flush_file, partial_path
from gspo_services.broker.rows import ArchiveRow, GroupRow, TrajectoryRow
from gspo_services.broker.store.payload import StoredChunk, join

ARCHIVE_DIRECTORY: Final = "archive"
PREFIX: Final = "trajectories-"
ROW_GROUP_BYTES: Final = 4 << 20
"""Memory of the trajectories of one row group: what waits until it is written, and what is decoded at once when one of them
is read. Writing it takes about twice as much besides."""
CACHE_BYTES: Final = 32 << 20
TRAJECTORY_BYTES: Final = 800
"""Memory that the rows of a trajectory take..."""
CHUNK_BYTES: Final = 320
"""...and a chunk beside its tokens. With an answer of 20 tokens both are six times as much as its tokens."""
COMPRESSION_LEVEL: Final = 9
_PAGE_BYTES: Final = 8 << 20
"""One page for each column of a row group: the compression sees all of it."""
_TOKEN_BYTES: Final = 8
_READ: Final = ["trajectory_id", "token_ids", "logprobs", "chunks"]
_WITHOUT_DICTIONARY: Final = ("token_ids.list.element", "logprobs.list.element")
"""A dictionary makes both larger, and would make one value of 0.0 and -0.0."""
_HASHED_AT_ONCE: Final = 1 << 20


class ArchiveDamaged(ValueError):
    """An archive file is missing, or is not what was written. The text names it."""


@dataclass(frozen=True)
class ArchivedGroup:
    """One group with everything that was streamed of it."""

    group: GroupRow
    members: Sequence[tuple[TrajectoryRow, Sequence[StoredChunk]]]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for _, chunks in self.members for chunk in chunks)

    @property
    def memory_bytes(self) -> int:
        return sum(_memory_bytes(chunks) for _, chunks in self.members)


class ArchiveWriter:
    """Writes one file under a partial name; ``publish`` gives it its own. Not thread-safe."""

    def __init__(self, run_directory: Path, archive: int) -> None:
        """``archive``: the file's number. Raises: OSError."""
        import pyarrow
        import pyarrow.parquet as parquet

        # Its own allocators keep what they have freed; what glibc keeps, the broker gives back.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        self._archive = archive
        self._directory = run_directory / ARCHIVE_DIRECTORY
        self._directory.mkdir(exist_ok=True)
        self.partial = partial_path(self._directory / f"{PREFIX}{archive:06d}.parquet")
        self._schema = _schema()
        others = {".".join(name) for name in _leaves(self._schema)}.difference(_WITHOUT_DICTIONARY)
        self._writer = parquet.ParquetWriter(
            self.partial,
            self._schema,
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=sorted(others),
            data_page_size=_PAGE_BYTES,
            write_statistics=["trajectory_id", "group_id", "batch"],
        )
        self._pending: list[ArchivedGroup] = []
        self._pending_bytes = 0
        self._num_row_groups = 0
        self.places: dict[int, int] = {}
        """The row group of each group."""
        self._groups: list[tuple[int | None, int, int]] = []
        """The batch that it is in for good, number of trajectories and of tokens of each group."""

    def add(self, group: ArchivedGroup) -> None:
        """Add a group, whose chunks are checked. Raises: ValueError when they are damaged; OSError."""
        for _, chunks in group.members:
            join(chunks)
        self._pending.append(group)
        self._pending_bytes += group.memory_bytes
        self.places[group.group.group_id] = self._num_row_groups
        # One whose prompt was sampled again still names the batch that was quarantined, which others of it may be in yet.
        batch = group.group.batch if group.group.status == "batched" else None
        self._groups.append((batch, len(group.members), group.num_tokens))
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def _write_row_group(self) -> None:
        import pyarrow

        table = pyarrow.Table.from_arrays(_arrays(self._schema, self._pending), schema=self._schema)
        # OSError and its subclasses as they are; pyarrow's other errors would be mistakes here.
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._num_row_groups += 1
        self._pending, self._pending_bytes = [], 0

    def close(self) -> ArchiveRow:
        """Flush the file to disk, and read it again to its end. Returns what the ledger will know of it.

        Raises: OSError; ArchiveDamaged when the disk does not give back what was written.
        """
        if self._pending:
            self._write_row_group()
        self._writer.close()
        flush_file(self.partial)
        self._require_readable()
        batches = [batch for batch, _, _ in self._groups if batch is not None]
        digest = file_digest(self.partial)
        return ArchiveRow(
            archive=self._archive,
            # Never the name of other content: a commit that seemed to fail may have been made.
            name=f"{PREFIX}{self._archive:06d}-{digest[:8]}.parquet",
            num_bytes=self.partial.stat().st_size,
            sha256=digest,
            num_groups=len(self._groups),
            num_trajectories=sum(members for _, members, _ in self._groups),
            num_tokens=sum(tokens for _, _, tokens in self._groups),
            first_batch=min(batches, default=None),
            last_batch=max(batches, default=None),
        )

    def _require_readable(self) -> None:
        found = 0
        for place in range(self._num_row_groups):
            for chunks in _read_row_group(self.partial, place).values():
                try:
                    found += join(chunks).num_tokens
                except ValueError as error:
                    raise ArchiveDamaged(f"{self.partial} was written and reads differently: {error}") from error
        written = sum(tokens for _, _, tokens in self._groups)
        if found != written:
            raise ArchiveDamaged(f"{self.partial} holds {found} tokens, {written} were written")

    def publish(self, row: ArchiveRow) -> None:
        """Give the closed file the name in ``row``, durably. Raises: OSError."""
        self.partial.rename(self._directory / row.name)
        flush_file(self._directory)
        flush_file(self._directory.parent)

    def discard(self) -> None:
        """Remove what was written and not published. Raises: OSError."""
        # Its footer does not matter any more, and may not fit the disk.
        with suppress(OSError):
            self._writer.close()
        self.partial.unlink(missing_ok=True)


class ArchiveFiles:
    """Reads what is archived of one run. Not thread-safe. Keeps some decoded row groups: neighbours are read together."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory / ARCHIVE_DIRECTORY
        self._decoded: OrderedDict[tuple[str, int], dict[int, list[StoredChunk]]] = OrderedDict()
        self._sizes: dict[tuple[str, int], int] = {}

    def chunks(self, archive: ArchiveRow, place: int, trajectory_id: int) -> list[StoredChunk]:
        """A trajectory's chunks in order. Raises: ArchiveDamaged."""
        key = (archive.name, place)
        if key not in self._decoded:
            self._keep(key, self._read(archive, place))
        self._decoded.move_to_end(key)
        found = self._decoded[key].get(trajectory_id)
        if found is None:
            raise ArchiveDamaged(f"{self._directory / archive.name} does not hold trajectory {trajectory_id}")
        return found

    def path(self, archive: ArchiveRow) -> Path:
        return self._directory / archive.name

    def _read(self, archive: ArchiveRow, place: int) -> dict[int, list[StoredChunk]]:
        path = self.path(archive)
        try:
            if path.stat().st_size != archive.num_bytes:
                raise ValueError(f"it has {path.stat().st_size} bytes, {archive.num_bytes} were written")
            return _read_row_group(path, place)
        except FileNotFoundError as error:
            raise ArchiveDamaged(f"{path} is missing; {held(archive)}") from error
        # pyarrow's own errors are subclasses of these, and so are those of a footer that it cannot make sense of.
        except (OSError, ValueError, KeyError, TypeError, IndexError, NotImplementedError, MemoryError) as error:
            raise ArchiveDamaged(f"{path} is damaged: {error}; {held(archive)}") from error

    def _keep(self, key: tuple[str, int], found: dict[int, list[StoredChunk]]) -> None:
        self._decoded[key] = found
        self._sizes[key] = sum(map(_memory_bytes, found.values()))
        while len(self._decoded) > 1 and sum(self._sizes.values()) > CACHE_BYTES:
            oldest, _ = self._decoded.popitem(last=False)
            del self._sizes[oldest]


def _memory_bytes(chunks: Sequence[StoredChunk]) -> int:
    """About what a trajectory with these chunks takes."""
    return TRAJECTORY_BYTES + sum(CHUNK_BYTES + _TOKEN_BYTES * chunk.num_tokens for chunk in chunks)


def held(archive: ArchiveRow) -> str:
    """What a file held, in words."""
    text = f"it held the tokens of {archive.num_trajectories} trajectories in {archive.num_groups} groups"
    if archive.first_batch is not None:
        text += f", among them those of batches {archive.first_batch} to {archive.last_batch}"
    return text


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises: OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASHED_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def remove_unrecorded(run_directory: Path, next_archive: int) -> None:
    """Remove what a broker that was killed had written and not recorded: files from number ``next_archive`` on, and partial
    ones. Raises: OSError."""
    directory = run_directory / ARCHIVE_DIRECTORY
    for path in [*directory.glob(f"{PREFIX}*.parquet"), *directory.glob(f"{partial_path(directory / PREFIX).name}*")]:
        number = path.name.removeprefix(PREFIX)[:6]
        if not path.name.startswith(PREFIX) or (number.isdigit() and int(number) >= next_archive):
            path.unlink()


# --- columns ------------------------------------------------------------------------------------------------------------


def _schema() -> Any:
    import pyarrow as pa

    whole, text = pa.int64(), pa.string()
    segment = pa.struct([("kind", text), ("turn", whole), ("num_tokens", whole), ("sequence", whole)])
    run = pa.struct([("version", whole), ("num_tokens", whole)])
    chunk = pa.struct(
        [("start", whole), ("epoch", whole), ("num_tokens", whole), ("header", pa.binary()), ("checksum", whole)]
    )
    return pa.schema(
        [
            *((name, whole) for name in ("trajectory_id", "group_id")),
            *((name, text) for name in ("split", "group_status", "drop_reason")),
            *((name, whole) for name in ("prompt", "task_index", "evaluation", "batch")),
            *((name, text) for name in ("status", "finish_reason")),
            *((name, whole) for name in ("num_tokens", "num_action_tokens", "num_turns")),
            ("reward", pa.float64()),
            ("turn_rewards", pa.list_(pa.float64())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("segments", pa.list_(segment)),
            ("version_runs", pa.list_(run)),
            ("chunks", pa.list_(chunk)),
        ]
    )


def _leaves(schema: Any) -> list[tuple[str, ...]]:
    """The path of each column as Parquet names it."""
    import pyarrow as pa

    def below(name: tuple[str, ...], kind: Any) -> list[tuple[str, ...]]:
        if pa.types.is_list(kind):
            return below((*name, "list", "element"), kind.value_type)
        if pa.types.is_struct(kind):
            return [leaf for field in kind for leaf in below((*name, field.name), field.type)]
        return [name]

    return [leaf for field in schema for leaf in below((field.name,), field.type)]


def _arrays(schema: Any, groups: Sequence[ArchivedGroup]) -> list[Any]:
    """The columns of one row group."""
    import pyarrow as pa

    rows = [(group.group, row, chunks) for group in groups for row, chunks in group.members]
    plain = [_plain(group, row, chunks) for group, row, chunks in rows]
    lengths = [sum(chunk.num_tokens for chunk in chunks) for _, _, chunks in rows]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = []
    for field in schema:
        if field.name in ("token_ids", "logprobs"):
            data = b"".join(getattr(chunk, field.name) for _, _, chunks in rows for chunk in chunks)
            values = np.frombuffer(data, "<i4" if field.name == "token_ids" else "<f4")
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(values), type=field.type))
        else:
            columns.append(pa.array([row[field.name] for row in plain], type=field.type))
    return columns


def _plain(group: GroupRow, row: TrajectoryRow, chunks: Sequence[StoredChunk]) -> dict[str, Any]:
    payload = join(chunks)
    return {
        "trajectory_id": row.trajectory_id,
        "group_id": row.group_id,
        "split": group.split,
        "group_status": group.status,
        "drop_reason": group.drop_reason,
        "prompt": group.prompt,
        "task_index": group.task_index,
        "evaluation": group.evaluation,
        "batch": group.batch,
        "status": row.status,
        "finish_reason": row.finish_reason,
        "num_tokens": row.num_tokens,
        "num_action_tokens": row.num_action_tokens,
        "num_turns": row.num_turns,
        "reward": row.reward if row.status == "finished" else None,
        "turn_rewards": list(row.turn_rewards),
        "segments": [msgspec.structs.asdict(segment) for segment in payload.segments],
        "version_runs": [msgspec.structs.asdict(run) for run in payload.version_runs],
        "chunks": [
            {
                "start": chunk.start,
                "epoch": chunk.epoch,
                "num_tokens": chunk.num_tokens,
                "header": chunk.header,
                "checksum": chunk.checksum,
            }
            for chunk in chunks
        ],
    }


def _read_row_group(path: Path, place: int) -> dict[int, list[StoredChunk]]:
    """Raises: OSError, ValueError and pyarrow's subclasses of them."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        table = file.read_row_group(place, columns=_READ)
    found: dict[int, list[StoredChunk]] = {}
    ids, logprobs = (table.column(name).combine_chunks() for name in ("token_ids", "logprobs"))
    trajectories = table.column("trajectory_id").to_pylist()
    for index, (trajectory_id, chunks) in enumerate(zip(trajectories, table.column("chunks").to_pylist(), strict=True)):
        # Values, not ``to_pylist``: no object for each token.
        id_bytes = ids[index].values.to_numpy(zero_copy_only=False).astype("<i4", copy=False).tobytes()
        logprob_bytes = logprobs[index].values.to_numpy(zero_copy_only=False).astype("<f4", copy=False).tobytes()
        found[trajectory_id] = [_chunk(trajectory_id, chunk, id_bytes, logprob_bytes) for chunk in chunks]
    return found


def _chunk(trajectory_id: int, chunk: dict[str, Any], id_bytes: bytes, logprob_bytes: bytes) -> StoredChunk:
    part = slice(4 * chunk["start"], 4 * (chunk["start"] + chunk["num_tokens"]))
    return StoredChunk(
        trajectory_id=trajectory_id,
        start=chunk["start"],
        epoch=chunk["epoch"],
        num_tokens=chunk["num_tokens"],
        header=chunk["header"],
        token_ids=id_bytes[part],
        logprobs=logprob_bytes[part],
        checksum=chunk["checksum"],
    )
