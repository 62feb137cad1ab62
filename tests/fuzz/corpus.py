"""Inputs that are kept: those that once broke something, and those that reach code that the seeds do not."""

import hashlib
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
BROKEN: Final = "broken-"
"""Begins the names of inputs that broke something once."""


def kept(target: str) -> list[bytes]:
    """The inputs of a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*")) if path.is_file()]


def keep(target: str, data: bytes, *, broken: bool = False) -> Path:
    """Write an input under the digest of its content."""
    path = CORPUS / target / f"{BROKEN if broken else ''}{hashlib.blake2b(data, digest_size=8).hexdigest()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
