"""A rollout opens a sandbox for environments that score programs, and for no other."""

from pathlib import Path

import pytest

from gspo_services.rollout.sandboxes import open_sandbox
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import SandboxSection
from gspo_services.tasks.environments import create_environment


async def test_an_environment_without_programs_gets_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("arithmetic", "dataset"):
        async with open_sandbox(SandboxSection(), create_environment(name, {})) as sandboxes:
            assert sandboxes is None


async def test_without_bubblewrap_a_rollout_of_programs_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Code is never run bare."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("code", "contest"):
        with pytest.raises(ConfigurationError, match=r"the environment runs programs of the policy: (.|\n)*apt-get install"):
            async with open_sandbox(SandboxSection(), create_environment(name, {})):
                pass
