"""What a rollout and its SGLang server agree on to patch live parameters (gspo_services.rollout.weights.patch)."""

from typing import Final

LOAD_FORMAT: Final = "gspo_patch"
"""Value of load_format with which /update_weights_from_disk patches the parameters it has, instead of loading them."""
ABILITY: Final = "gspo_services.shared.sglang_cpu.patching"
"""A server that can names this among its custom_weight_loader in /server_info."""
INDICES: Final = ".indices"
VALUES: Final = ".values"
"""The endings of the names of a parameter's two arrays."""


def patch_file(rank: int) -> str:
    """Return the file of a patch for this tensor rank; replicas of the model read the same."""
    return f"patch-{rank}.safetensors"
