"""Programs that nobody has read, such as a model's, run here: without a network, without rights, within limits."""

from gspo_services.tasks.sandbox.cgroups import CGROUP_WAY_OUT, NO_CGROUP
from gspo_services.tasks.sandbox.choice import local_options, max_sandboxes_of, open_configured, unusable
from gspo_services.tasks.sandbox.interface import (
    LimitName,
    ProgramRefused,
    RunOutcome,
    Sandbox,
    SandboxError,
    Sandboxes,
    SandboxLimits,
    SandboxUnavailable,
)
from gspo_services.tasks.sandbox.local import LocalOptions, LocalSandboxes

__all__ = [
    "CGROUP_WAY_OUT",
    "NO_CGROUP",
    "LimitName",
    "LocalOptions",
    "LocalSandboxes",
    "ProgramRefused",
    "RunOutcome",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxUnavailable",
    "Sandboxes",
    "local_options",
    "max_sandboxes_of",
    "open_configured",
    "unusable",
]  # fmt: skip
