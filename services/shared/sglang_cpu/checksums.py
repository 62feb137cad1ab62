"""Replaces the hash of SGLang's weight checksums: XXH3 instead of SHA-256.

Generation stops while /weights_checker hashes, and with SHA-256 that was a third of the pause of a weight update. On a GPU
SGLang uses no cryptographic hash either: the checksums find a load that went wrong, not an attacker in SGLang's own memory.
"""

from types import ModuleType

import torch

from gspo_services.shared.weights import xxh3_checksum


def hash_with_xxh3(weight_checker: ModuleType) -> None:
    """Replace the hash of ``sglang.srt.utils.weight_checker``. Each checksum names its hash, so a reader can tell."""
    weight_checker._hash_tensor = xxh3_of_tensor  # type: ignore[attr-defined]


def xxh3_of_tensor(tensor: torch.Tensor) -> str:
    """Hash a tensor's bytes, of any shape and type."""
    return xxh3_checksum([tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data])
