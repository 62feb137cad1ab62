"""The format of the corpus: a .tar.xz of small files in one flat folder.

The same cases give the same bytes: names are sorted, and the archive records no times and no owners. Reading is strict,
so a foreign or damaged archive cannot point outside of its folder, fill the memory, or lose cases silently.
"""

import io
import lzma
import re
import tarfile
from collections.abc import Mapping
from typing import Final

MAX_INPUT_BYTES: Final = 64 * 1024
"""Size of one case."""
MAX_UNPACKED_BYTES: Final = 4 * 1024 * 1024
"""Size of an archive without its compression: a damaged or hostile one must not fill the memory."""
MAX_XZ_MEMORY_BYTES: Final = 64 * 1024 * 1024
"""Memory for decompression. Archives from ``pack`` need 9 MiB."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


class ArchiveError(ValueError):
    """An archive holds something that ``pack`` does not write, or a case does not fit into one."""


def pack(cases: Mapping[str, bytes]) -> bytes:
    """Cases by name, as an archive. Raises: ArchiveError for a name or a size that an archive cannot hold."""
    return lzma.compress(_tar(cases), format=lzma.FORMAT_XZ, preset=6)


def unpack(archive: bytes) -> dict[str, bytes]:
    """The cases of an archive, sorted by name. Raises: ArchiveError for anything that ``pack`` does not write."""
    raw = _decompress(archive)
    cases: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            for member in tar:
                _require_fits(member.name, member.size)
                if not member.isreg():
                    raise ArchiveError(f"member {member.name!r} is a link or a special file, only plain files are allowed")
                if member.name in cases:
                    raise ArchiveError(f"two members are called {member.name!r}")
                content = tar.extractfile(member)
                assert content is not None
                cases[member.name] = content.read()
    except (tarfile.TarError, OSError, OverflowError) as error:
        raise ArchiveError(f"the tar file inside is damaged: {error}") from error
    # tarfile takes a damaged header for the end of the archive. This check also refuses times, owners and another order.
    if _tar(cases) != raw:
        raise ArchiveError("its members are damaged, or another program packed it")
    return cases


def _decompress(archive: bytes) -> bytes:
    decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY_BYTES)
    try:
        raw = decompressor.decompress(archive, max_length=MAX_UNPACKED_BYTES + 1)
    except lzma.LZMAError as error:
        raise ArchiveError(f"its compression is damaged: {error}") from error
    if len(raw) > MAX_UNPACKED_BYTES:
        raise ArchiveError(f"it unpacks to more than {MAX_UNPACKED_BYTES} bytes")
    if not decompressor.eof:
        raise ArchiveError("it ends too early")
    if decompressor.unused_data:
        raise ArchiveError(f"{len(decompressor.unused_data)} bytes follow its end")
    return raw


def _tar(cases: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in sorted(cases.items()):
            _require_fits(name, len(data))
            member = tarfile.TarInfo(name)  # time, owner and group are 0
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    if out.tell() > MAX_UNPACKED_BYTES:
        raise ArchiveError(f"{len(cases)} cases take {out.tell()} bytes, {MAX_UNPACKED_BYTES} allowed (MAX_UNPACKED_BYTES)")
    return out.getvalue()


def _require_fits(name: str, size: int) -> None:
    if not NAME.fullmatch(name):
        raise ArchiveError(
            f"member {name!r} has no plain file name: up to 80 of A-Z a-z 0-9 . _ - that begin with a letter or digit"
        )
    if size > MAX_INPUT_BYTES:
        raise ArchiveError(f"member {name!r} has {size} bytes, {MAX_INPUT_BYTES} allowed (MAX_INPUT_BYTES)")
