"""The files of one computer, and how a command has changed them. Pure: what a sandbox says of them is checked here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from gspo.tasks.computer import ComputerError, require_inside

MOST_ENTRIES: Final = 10_000
KINDS: Final = ("file", "link", "folder")


class BadChange(ValueError):
    """What should be a change of files is none."""


class Entry(NamedTuple):
    """A file, a link with its target as ``content``, or a folder."""

    kind: str
    mode: int
    mtime_ns: int
    content: bytes
    digest: str


def entry(kind: str, mode: int, mtime_ns: int, content: bytes) -> Entry:
    """With the content's digest."""
    return Entry(kind, mode, mtime_ns, content, hashlib.sha256(content).hexdigest())


class ComputerFiles:
    """All files, by their paths; it never changes."""

    def __init__(self, entries: Mapping[str, Entry] = {}) -> None:
        self._entries = entries
        self.num_bytes = sum(len(each.content) for each in entries.values())

    def changed(self, change: bytes) -> ComputerFiles:
        """The files after ``change``, a line of JSON and contents as ``inside/pack.py`` writes them. Raises: BadChange."""
        line, _, contents = change.partition(b"\n")
        entries = dict(self._entries)
        try:
            header = json.loads(line)
            for path in header["removed"]:
                del entries[path]
            place = 0
            for path, kind, mode, mtime_ns, size in header["entries"]:
                if not _is_inside(path) or kind not in KINDS or not 0 <= size <= len(contents) - place:
                    raise BadChange(f"{path!r:.100} is no {kind!r:.20} of {size!r:.20} bytes")
                entries[path] = entry(kind, int(mode) & 0o777, int(mtime_ns), contents[place : place + size])
                place += size
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise BadChange(f"not a change of files: {error!r:.200}") from error
        if place != len(contents) or len(entries) > MOST_ENTRIES:
            raise BadChange(f"a change with {len(contents) - place} bytes too many, or {len(entries)} files")
        return ComputerFiles(entries)

    def whole(self) -> bytes:
        """The change that makes these files of none, as ``inside/unpack.py`` reads it."""
        entries = sorted(self._entries.items())
        listed = [[path, each.kind, each.mode, each.mtime_ns, len(each.content)] for path, each in entries]
        header = json.dumps({"removed": [], "entries": listed}).encode()
        return b"".join([header, b"\n", *(each.content for _, each in entries)])

    def asked(self, most_bytes: int) -> bytes:
        """What ``inside/pack.py`` compares with."""
        known = {path: [each.kind, each.mode, each.mtime_ns, each.digest] for path, each in self._entries.items()}
        return json.dumps({"entries": known, "most_bytes": most_bytes}).encode()

    def written(self, files: Mapping[str, bytes], mtime_ns: int) -> ComputerFiles:
        """With these files of a user. Raises: ComputerError where a file or a link is on the way."""
        entries = dict(self._entries)
        for path, content in files.items():
            require_inside(path)
            for above in _above(path):
                if entries.setdefault(above, entry("folder", 0o755, 0, b"")).kind != "folder":
                    raise ComputerError(f"the path {path[:100]!r} goes through {above[:100]!r}, which is no folder")
            old = entries.get(path)
            if old is not None and old.kind != "file":
                raise ComputerError(f"the path {path[:100]!r} is a {old.kind}: remove it first")
            entries[path] = entry("file", 0o644 if old is None else old.mode, mtime_ns, content)
        if len(entries) > MOST_ENTRIES:
            raise ComputerError(f"{len(entries)} files: a computer has at most {MOST_ENTRIES}")
        return ComputerFiles(entries)

    def read(self, path: str) -> bytes:
        """The content of a file. Raises: ComputerError."""
        require_inside(path)
        found = self._entries.get(path)
        if found is None or found.kind != "file":
            what = "there is no such file" if found is None else f"it is a {found.kind}"
            raise ComputerError(f"{path[:100]!r} cannot be read: {what}")
        return found.content


def _above(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:number]) for number in range(1, len(parts)))


def _is_inside(path: Any) -> bool:
    return isinstance(path, str) and "\0" not in path and not any(part in ("", ".", "..") for part in path.split("/"))
