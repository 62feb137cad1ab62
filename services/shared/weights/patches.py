"""What a rollout and its SGLang server agree on to patch live parameters (gspo_services.rollout.weights.patch)."""

from typing import Final

PATCHER: Final = "gspo_services.shared.sglang_patching.apply"
"""The loader that patches. A server can if it names it among its custom_weight_loader in /server_info."""
INDICES: Final = ".indices"
VALUES: Final = ".values"
"""The endings of the names of a parameter's two arrays."""


def patch_file(rank: int) -> str:
    """Return the file of a patch for this tensor rank."""
    return f"patch-{rank}.safetensors"


def answer_file(rank: int) -> str:
    """Return the file in which this tensor rank answers, beside the patch: JSON with "elements" or "error"."""
    return f"answer-{rank}.json"
