"""SGLang without a GPU: a platform plug-in that runs its own PyTorch reference of every fused operation.

SGLang finds `activate` through the entry point `torch_cpu` of group `sglang.srt.platforms`. It stays inert unless it
is asked for by SGLANG_PLATFORM=torch_cpu, so installing this package changes nothing on a machine with a GPU.
Importing this module costs nothing; torch and SGLang are imported by SGLang's own processes only.
"""

import os
from importlib.metadata import version

PLATFORM_NAME = "torch_cpu"
"""Value of SGLANG_PLATFORM that selects the plug-in, and its name among the entry points."""

SGLANG_VERSION = "0.5.23"
"""The only release the plug-in was tested with: it replaces private names, which move between releases."""


def require_tested_sglang() -> None:
    """Raise RuntimeError unless the SGLang that is installed is the one this plug-in was written for."""
    found = version("sglang")
    if found != SGLANG_VERSION:
        raise RuntimeError(
            f"the CPU platform plug-in works with sglang {SGLANG_VERSION} only, found {found}: "
            f"pip install --no-deps sglang=={SGLANG_VERSION}, or unset SGLANG_PLATFORM to run without the plug-in"
        )


def activate() -> str | None:
    """Entry point: name the platform class, or None where the plug-in must not be used.

    Asked for on a machine with a CUDA device it answers None, which SGLang reports as an error: serving on CPU
    beside an idle GPU is a mistake, not a preference.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    require_tested_sglang()
    import torch

    if torch.cuda.is_available():
        return None
    return "services.sglang_cpu.platform.TorchCpuPlatform"
