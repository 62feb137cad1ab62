"""Checks that a GPU computes in bfloat16, where a run does."""

from typing import Final

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

OLDEST: Final = (8, 0)
"""Ampere. Older GPUs have no bfloat16: torch emulates it, many times slower, and SGLang's kernels do not exist."""


def require_bfloat16(settings: Settings, device: str, capability: tuple[int, int]) -> None:
    """Check that a device of this compute capability has the types of the run. Raises: ConfigurationError."""
    dtypes = {"model.dtype": settings.model.dtype, "learner.dtype": settings.learner.dtype}
    asking = [key for key, dtype in dtypes.items() if dtype == "bfloat16"]
    if asking and capability < OLDEST:
        raise ConfigurationError(
            f"{' and '.join(asking)}: bfloat16, which {device} has not: its compute capability is {_text(capability)}, and "
            f"bfloat16 begins with {_text(OLDEST)} (Ampere); use a newer GPU, or float32 with CUDA_VISIBLE_DEVICES= on the "
            "CPU, because SGLang's kernels for CUDA know no float32"
        )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
