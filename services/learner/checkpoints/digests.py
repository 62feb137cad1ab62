"""Digests (XXH3-128) of a checkpoint's files: each rank notes those of the files it writes, and verifies a share of all.

They detect changes by a disk, not by a person. Computing them takes about as long as reading the files from memory. Files to
verify may be anybody's: they are read through ``ForeignTree``.
"""

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from gspo.files import flush_file
from gspo_protocol.messages import Count
from gspo_services.shared.runtime.foreign import ForeignError, ForeignTree, require_names

_NOTES: Final = "digests-"
_LOST: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors of reading a damaged or missing file. Any other error may be temporary."""


class FileDigest(msgspec.Struct, frozen=True):
    """The content of one file."""

    num_bytes: Count
    digest: str


_Notes = dict[str, FileDigest]


def text_digest(text: str) -> str:
    """Digest of a text."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def write_digests(partial: Path, rank: int, files: Sequence[Path]) -> None:
    """Note what ``files`` hold: all that this rank has just written below ``partial``. Any thread may call it.

    Raises: OSError.
    """
    names = [str(path.relative_to(partial)) for path in files]
    notes = dict(zip(names, _in_parallel(ForeignTree(partial), names), strict=True))
    path = partial / f"{_NOTES}{rank:05d}.json"
    path.write_bytes(msgspec.json.encode(notes))
    flush_file(path)


def take_digests(partial: Path) -> dict[str, FileDigest]:
    """Collect the digests that all ranks noted, and remove the notes.

    Raises: OSError, also when a file was not noted, or a noted file is missing.
    """
    found: dict[str, FileDigest] = {}
    for path in sorted(partial.glob(f"{_NOTES}*.json")):
        found |= msgspec.json.decode(path.read_bytes(), type=_Notes)
        path.unlink()
    there = {str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()}
    if there != set(found):
        raise OSError(f"{partial}: its files differ from those that the ranks wrote: {sorted(there ^ set(found))[:4]}")
    return dict(sorted(found.items()))


def find_damage(path: Path, files: Mapping[str, FileDigest], rank: int, world_size: int) -> str:
    """Check this rank's share of ``files``; returns what is wrong, or an empty text.

    Raises: OSError when a file cannot be read for a possibly temporary reason.
    """
    names, tree = sorted(files), ForeignTree(path)
    share = names[rank::world_size]
    try:
        require_names(files)
        # Cheap, so every rank looks at all sizes, and most damage is found before anything is hashed.
        for name in names:
            if (found := tree.num_bytes(name)) != files[name].num_bytes:
                return f"{path / name} has {found} bytes, {files[name].num_bytes} were written"
        # What is loaded is found by its kind, not by the list.
        added = sorted({str(each.relative_to(path)) for each in path.rglob("*.safetensors")} - files.keys())
        if added:
            return f"{path / added[0]} is not among the files that were written"
        digests = _in_parallel(tree, share)
    except ForeignError as error:
        return str(error) if str(path) in str(error) else f"{path}: {error}"
    except OSError as error:
        if error.errno not in _LOST:
            raise
        return f"{error.filename} cannot be read: {error.strerror}"
    for name, digest in zip(share, digests, strict=True):
        if digest != files[name]:
            return f"{path / name} has digest {digest.digest}, {files[name].digest} was written"
    return ""


def _in_parallel(tree: ForeignTree, names: Sequence[str]) -> list[FileDigest]:
    """Raises: ForeignError, OSError."""

    def digest(name: str) -> FileDigest:
        with tree.open(name) as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128)
            return FileDigest(num_bytes=file.tell(), digest=digest.hexdigest())

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(digest, names))
