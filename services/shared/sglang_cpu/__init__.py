"""SGLang without a GPU: a platform plug-in that runs its own PyTorch reference of every fused operation.

SGLang finds ``activate`` through the entry point ``torch_cpu`` of the group ``sglang.srt.platforms``. The plug-in does
nothing without SGLANG_PLATFORM=torch_cpu, so installing this package changes nothing on a machine with a GPU. Importing this
module costs nothing: only SGLang's own processes import torch and SGLang.
"""

import os
from importlib.metadata import version

PLATFORM_NAME = "torch_cpu"
"""Value of SGLANG_PLATFORM that selects the plug-in, and its name among the entry points."""

SGLANG_VERSION = "0.5.23"
"""The only release that the plug-in was tested with: it replaces private names, which change between releases."""


def require_tested_sglang() -> None:
    """Raises: RuntimeError unless the installed SGLang is the release that this plug-in was written for."""
    found = version("sglang")
    if found != SGLANG_VERSION:
        raise RuntimeError(
            f"the CPU platform plug-in works with sglang {SGLANG_VERSION} only, found {found}: "
            f"pip install --no-deps sglang=={SGLANG_VERSION}, or unset SGLANG_PLATFORM to run without the plug-in"
        )


def activate() -> str | None:
    """Name the platform class (the entry point), or return None if the plug-in must not be used.

    On a machine with a CUDA device it returns None, which SGLang reports as an error: serving on a CPU beside an idle GPU is
    a mistake, not a preference.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    require_tested_sglang()
    import torch

    if torch.cuda.is_available():
        return None
    return "gspo_services.shared.sglang_cpu.platform.TorchCpuPlatform"
