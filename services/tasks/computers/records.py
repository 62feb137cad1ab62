"""What the journal keeps of a step of a computer: its answer, and how it changed the files."""

from __future__ import annotations

import base64
import zlib
from typing import Any, Final

from gspo.tasks.computer import RUN, WRITE
from gspo.tasks.environments import Plain
from gspo_services.tasks.computers.files import BadChange

MAX_CHANGE_BYTES: Final = 128 * 1024
"""Of one command's change, compressed: as text, with the command's output, it fits an entry of the journal."""
MAX_CHANGES_BYTES: Final = 3 * 1024 * 1024
"""Of all changes of an episode: as text they leave half of its journal to the rest."""
MAX_OUTPUT_BYTES: Final = 16 * 1024
"""Of a command's output, half of it from the beginning and half from the end."""

Answer = dict[str, Plain]


def recorded(answer: Answer, change: bytes | None) -> Plain:
    """The result of a command as the journal keeps it; ``change``, compressed, is None where it is too large."""
    return {"answer": answer, "files": None if change is None else base64.b64encode(change).decode()}


def compressed(change: bytes) -> bytes:
    """The change as it is recorded."""
    return zlib.compress(change, 6)


def change_in(name: str, result: Plain, most_bytes: int) -> tuple[bytes, int] | None:
    """The recorded change of a step and its bytes in the record; None for a step without one. Raises: BadChange."""
    if name != RUN:
        return None
    if not isinstance(result, dict) or not isinstance(text := result.get("files"), str):
        raise BadChange("the record of a command has no files")
    unpacking = zlib.decompressobj()
    try:
        small = base64.b64decode(text, validate=True)
        change = unpacking.decompress(small, most_bytes)
    except (ValueError, zlib.error) as error:
        raise BadChange(f"the files in the record of a command cannot be read: {error}") from error
    if not unpacking.eof:
        raise BadChange(f"the record of a command has more than {most_bytes} bytes of files: raise agent.computer_bytes")
    return change, len(small)


def answer_in(name: str, result: Plain) -> Plain:
    """What the agent gets of a recorded step, of a computer or not."""
    if name not in (RUN, WRITE) or not isinstance(result, dict):
        return result
    return result.get("answer")


def loses_files(name: str, result: Any) -> bool:
    """Whether the files after this step cannot be made again."""
    return name == RUN and isinstance(result, dict) and result.get("files", "") is None


def shortened(output: bytes) -> str:
    """The output as text, with its middle left out where it is long."""
    if len(output) <= MAX_OUTPUT_BYTES:
        return output.decode(errors="replace")
    half = MAX_OUTPUT_BYTES // 2
    head, tail = output[:half].decode(errors="replace"), output[-half:].decode(errors="replace")
    return f"{head}\n[... {len(output) - 2 * half} bytes left out ...]\n{tail}"
