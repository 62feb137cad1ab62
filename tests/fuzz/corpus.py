"""Inputs that are kept: those that once broke something, and those that reach code that the seeds do not.

Each target has one archive, tests/fuzz/corpus/FAMILY/TARGET.tar.xz.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.fuzz.archive import ArchiveError, pack, unpack
from tests.fuzz.targets.registry import FAMILIES

CORPUS: Final = Path(__file__).parent / "corpus"
BROKEN: Final = "broken-"
"""Prefix of the names of inputs that once broke something."""


class CorpusError(ValueError):
    """An archive of the corpus cannot be read, or does not take a case. The text says what to do."""


def archive_of(target: str, corpus: Path = CORPUS) -> Path:
    """Where the cases of a target are. The file is absent while there are none."""
    (family,) = (family for family, targets in FAMILIES.items() if target in {each.name for each in targets})
    return corpus / family / f"{target}.tar.xz"


def cases_of(target: str, corpus: Path = CORPUS) -> dict[str, bytes]:
    """The inputs of a target by name, sorted. Raises: CorpusError for an archive that is damaged."""
    path = archive_of(target, corpus)
    if not path.exists():
        return {}
    try:
        return unpack(path.read_bytes())
    except ArchiveError as error:
        raise CorpusError(
            f"{path}: {error}. Restore it: git restore {path}. Then add missing cases with: "
            f"python -m tests.fuzz --add {target} FILE"
        ) from error


def keep(target: str, inputs: Sequence[bytes], *, broken: bool = False, corpus: Path = CORPUS) -> list[str]:
    """Put inputs into the archive of a target, each named by the digest of its content. Returns the names."""
    prefix = BROKEN if broken else ""
    named = {f"{prefix}{hashlib.blake2b(data, digest_size=8).hexdigest()}": data for data in inputs}
    _write(target, cases_of(target, corpus) | named, corpus)
    return list(named)


def add(target: str, file: Path, corpus: Path = CORPUS) -> str:
    """Put a file that broke something into the archive of a target. Returns the name of the case.

    A file called broken-WHAT keeps its name; any other is named by the digest of its content. Raises: CorpusError for a
    name that another case has, a name or size that an archive cannot hold, or a damaged archive; OSError for the file.
    """
    data = file.read_bytes()
    if not file.name.startswith(BROKEN):
        return keep(target, [data], broken=True, corpus=corpus)[0]
    cases = cases_of(target, corpus)
    if cases.get(file.name, data) != data:
        raise CorpusError(
            f"{target} has another case called {file.name}: give the file another name that begins with {BROKEN}"
        )
    _write(target, cases | {file.name: data}, corpus)
    return file.name


def _write(target: str, cases: dict[str, bytes], corpus: Path) -> None:
    """Replace the archive, but only when its cases change: another release of xz may compress differently."""
    if cases == cases_of(target, corpus):
        return
    path = archive_of(target, corpus)
    try:
        archive = pack(cases)
    except ArchiveError as error:
        raise CorpusError(f"{path} stays as it is: {error}. Add a smaller or differently named file.") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(archive)
    os.replace(partial, path)
