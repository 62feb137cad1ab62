"""The hash behind SGLang's checksums of what a server holds: XXH3 in place of SHA-256.

Nothing is generated while /weights_checker hashes, and with SHA-256 that was a third of the pause of a weight update. On a
GPU SGLang does without cryptography, too: what it looks for is a load that went wrong, not an attacker in its own memory.
"""

from types import ModuleType

import torch

from services.weights import xxh3_checksum


def hash_with_xxh3(weight_checker: ModuleType) -> None:
    """Replace the hash of `sglang.srt.utils.weight_checker`. Checksums name it, so that nobody has to know who made them."""
    weight_checker._hash_tensor = xxh3_of_tensor  # type: ignore[attr-defined]


def xxh3_of_tensor(tensor: torch.Tensor) -> str:
    """The hash of a tensor's bytes, of any shape and type."""
    return xxh3_checksum([tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data])
