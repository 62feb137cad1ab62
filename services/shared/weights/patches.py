"""What a rollout and its SGLang server agree on to patch live parameters, and to verify them by sums of tiles."""

from typing import Final

import msgspec

PATCHER: Final = "gspo_services.shared.sglang_patching.apply"
"""The loader that patches. A server can if it names it among its custom_weight_loader in /server_info."""
SUMMER: Final = "gspo_services.shared.sglang_sums.report"
"""The loader that loads nothing and sums the parameters. A server can if it names it there."""
INDICES: Final = ".indices"
VALUES: Final = ".values"
"""The endings of the names of a parameter's two arrays."""


class PlacedParameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one rank's parameter has of the version's tensors: rectangles, row by row, one after the other; then padding."""

    num_bytes: int
    """With its padding."""
    rectangles: list[tuple[int, int, int, int, int]]
    """Bytes of a row of the whole tensor; the first row, and the one after the last; the same of bytes in a row."""
    transposed: bool = False
    """The tensor's matrices are transposed in the parameter."""


Places = dict[str, PlacedParameter]
"""By the parameters' names."""


def patch_file(rank: int) -> str:
    """Return the file of a patch for this tensor rank."""
    return f"patch-{rank}.safetensors"


def answer_file(rank: int) -> str:
    """Return the file in which this tensor rank answers, beside what it was asked for: JSON, with "error" where it
    failed."""
    return f"answer-{rank}.json"


def places_file(rank: int) -> str:
    """Return the file that says what each parameter of this tensor rank has of the version: Places, in MessagePack."""
    return f"places-{rank}.msgpack"


def sums_file(rank: int) -> str:
    """Return the file with the sums of this tensor rank's parameters: little-endian words of 64 bits."""
    return f"sums-{rank}.bin"
