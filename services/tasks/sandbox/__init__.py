"""Programs that nobody has read, such as a model's, run here: without a network, without rights, within limits."""

from gspo_services.tasks.sandbox.choosing import local_options, num_places, open_configured
from gspo_services.tasks.sandbox.interface import (
    Box,
    LimitName,
    ProgramRefused,
    RunOutcome,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxUnavailable,
)
from gspo_services.tasks.sandbox.local import LocalOptions, LocalSandbox

__all__ = [
    "Box", "LimitName", "LocalOptions", "LocalSandbox", "ProgramRefused", "RunOutcome",
    "Sandbox", "SandboxError", "SandboxLimits", "SandboxUnavailable", "local_options", "num_places", "open_configured",
]  # fmt: skip
