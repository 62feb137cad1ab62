"""A version's bytes in safetensors files, which this process maps, patches in place, and lets the engine load as they are.

The tensors lie in the version's order, cut into files between two tensors. A file is written as its bytes arrive, so that a
manifest alone takes no memory, and mapped once all have come: from then on no write can lack room. The engine gets hard
links, so nothing is written for it.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from gspo_protocol.deltas import Bytes, Places, Values, as_elements
from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.weights.file import header_of
from gspo_services.shared.runtime.errors import ServiceError

SHARD_BYTES: Final = 256 * 1024 * 1024
_PATTERN: Final = "weights-*.safetensors"


class _Shard:
    """One file. ``begin``, ``end``: its part of the version's bytes; ``first``, ``last``: its tensors."""

    def __init__(self, number: int, tensors: Sequence[TensorInfo], first: int, last: int, directory: Path | None) -> None:
        self.first, self.last = first, last
        self.begin = tensors[first].offset
        self.end = tensors[last - 1].offset + tensors[last - 1].num_bytes
        self.header = header_of(tensors[first:last])
        self.path = None if directory is None else directory / f"weights-{number:05}.safetensors"
        self._number = number
        self._file = -1
        self.data: Bytes = np.empty(0, dtype=np.uint8)
        """uint8 [end - begin], once mapped."""

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.end - self.begin

    def put(self, begin: int, data: memoryview) -> None:
        if self._file < 0:
            self._create()
        _write(self._file, data, len(self.header) + begin - self.begin)

    def map(self) -> None:
        if self._file < 0:
            self._create()
        mapped = mmap.mmap(self._file, self.num_bytes)
        os.close(self._file)
        self._file = -1
        self.data = np.frombuffer(mapped, dtype=np.uint8)[len(self.header) :]

    def reopen(self) -> None:
        """Map what an earlier process has left. Raises: OSError; ValueError when it is another file."""
        assert self.path is not None
        self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        found = os.fstat(self._file).st_size
        if found != self.num_bytes or os.pread(self._file, len(self.header), 0) != self.header:
            raise ValueError(f"{self.path} has {found} bytes or another header; this version has {self.num_bytes} bytes")
        self.map()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _create(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path is None:
            self._file = os.memfd_create(f"weights-{self._number}", os.MFD_CLOEXEC)
        else:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _write(self._file, memoryview(self.header), 0)


class WeightFiles:
    """The bytes of one version: ``put`` all of them, then ``map``; or ``reopen`` those of an earlier process."""

    def __init__(self, tensors: Sequence[TensorInfo], directory: Path | None, shard_bytes: int = SHARD_BYTES) -> None:
        """``tensors`` follow each other. ``directory``: None: files without a name, which no engine can load.
        ``shard_bytes``: a file with more has one tensor. Raises: ValueError for names that cannot be written.
        """
        self._tensors = tensors
        self._directory = directory
        self._shards = [
            _Shard(number, tensors, first, last, directory)
            for number, (first, last) in enumerate(_cut(tensors, shard_bytes))
        ]
        self._begins = [shard.begin for shard in self._shards]

    @property
    def num_bytes(self) -> int:
        return self._shards[-1].end

    def put(self, begin: int, data: memoryview) -> None:
        """Write bytes of the version from ``begin`` on. Raises: ServiceError when there is no room."""
        try:
            for shard, start, end in self._over(begin, begin + len(data)):
                shard.put(start, data[start - begin : end - begin])
        except OSError as error:
            raise self._no_room(error) from error

    def map(self) -> None:
        """All bytes were put. Raises: ServiceError."""
        try:
            for shard in self._shards:
                shard.map()
        except OSError as error:
            raise self._no_room(error) from error

    def reopen(self) -> None:
        """Map the files of an earlier process. Raises: OSError; ValueError when they are not of these tensors."""
        for shard in self._shards:
            shard.reopen()

    def tensor(self, index: int) -> memoryview:
        """Return a tensor's bytes, writable."""
        info = self._tensors[index]
        shard = self._shards[self._at(info.offset) if info.num_bytes else 0]
        begin = info.offset - shard.begin if info.num_bytes else 0
        return shard.data[begin : begin + info.num_bytes].data

    def read(self, begin: int, end: int) -> Bytes:
        """Bytes of the version: uint8 [end - begin]; a copy only where files meet."""
        pieces = [shard.data[start - shard.begin : stop - shard.begin] for shard, start, stop in self._over(begin, end)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, dtype=np.uint8)])

    def gather(self, offset: int, item_bytes: int, places: Places) -> Values:
        """The elements at ``places`` (ascending) of those that follow byte ``offset``: unsigned [len(places)]."""
        pieces = [elements[chosen] for elements, chosen, _ in self._elements(offset, item_bytes, places)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def scatter(self, offset: int, item_bytes: int, places: Places, values: Values) -> None:
        """Write these elements."""
        for elements, chosen, part in self._elements(offset, item_bytes, places):
            elements[chosen] = values[part]

    def link(self, directory: Path, indices: Iterable[int]) -> int:
        """Let ``directory`` have the files with these tensors, by hard links. Returns their bytes. Raises: OSError."""
        chosen = [shard for shard in self._shards if any(shard.first <= index < shard.last for index in indices)]
        for shard in chosen:
            if shard.path is None:
                raise ValueError("weights without a directory cannot be loaded by an engine")
            os.link(shard.path, directory / shard.path.name)
        return sum(shard.num_bytes for shard in chosen)

    def close(self) -> None:
        """Close files that were not mapped. Maps live as long as their readers."""
        for shard in self._shards:
            shard.close()

    def _at(self, place: int) -> int:
        return bisect_right(self._begins, place) - 1

    def _over(self, begin: int, end: int) -> Iterator[tuple[_Shard, int, int]]:
        """Yield the files that hold these bytes, each with its part of them."""
        at = self._at(begin)
        while begin < end:
            shard = self._shards[at]
            stop = min(end, shard.end)
            if stop > begin:
                yield shard, begin, stop
            begin, at = stop, at + 1

    def _elements(self, offset: int, item_bytes: int, places: Places) -> Iterator[tuple[Values, Places, slice]]:
        """For each file that has some of the places: its elements, the places there, and which of ``places`` these are."""
        end = offset + (int(places[-1]) + 1) * item_bytes
        done = 0
        for shard, start, stop in self._over(offset, end):
            elements = as_elements(shard.data[start - shard.begin : stop - shard.begin], item_bytes)
            before = (start - offset) // item_bytes
            until = len(places) if stop == end else int(np.searchsorted(places, before + len(elements)))
            if until > done:
                yield elements, places[done:until] - before if before else places[done:until], slice(done, until)
            done = until

    def _no_room(self, error: OSError) -> ServiceError:
        return ServiceError(
            f"weights ({self.num_bytes} bytes) cannot be written to {self._directory or 'memory'}: {error}; make room there "
            "or choose another rollout.weights_directory"
        )


def remove_files(directory: Path | None) -> None:
    """Remove the files of any version. Those who have mapped them still read them."""
    for path in directory.glob(_PATTERN) if directory is not None else ():
        with suppress(FileNotFoundError):
            path.unlink()


def _cut(tensors: Sequence[TensorInfo], shard_bytes: int) -> Iterator[tuple[int, int]]:
    first = 0
    for index, info in enumerate(tensors):
        if index > first and info.offset + info.num_bytes - tensors[first].offset > shard_bytes:
            yield first, index
            first = index
    yield first, len(tensors)


def _write(file: int, data: memoryview, place: int) -> None:
    while len(data):
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written
