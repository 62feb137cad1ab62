"""What a run was made with: its settings as flat keys, and the release and commit of the code."""

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from gspo_services.shared.settings import HIDDEN, Settings, told_settings

CHECKOUT: Final = Path(__file__).resolve().parents[3]
"""The directory of our sources, if this is a checkout and not an installed wheel."""
GIT_S: Final = 10.0
_SECRET: Final = re.compile(r"(^|_)(key|token|secret|password|credentials?)s?$", re.IGNORECASE)


def flat_settings(settings: Settings) -> dict[str, str | float | bool]:
    """Return every setting by section.key, as trackers take them. Possible secrets of a user's agent are hidden."""
    flat: dict[str, str | float | bool] = {}
    for section, values in told_settings(settings).items():
        _flatten(f"{section}.", values, flat, hidden=False)
    return flat


def _flatten(prefix: str, values: dict[str, Any], flat: dict[str, str | float | bool], *, hidden: bool) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            _flatten(f"{name}.", value, flat, hidden=hidden or name == "agent.environment")
        elif hidden or (_SECRET.search(key) and isinstance(value, str) and value):
            flat[name] = HIDDEN
        else:
            flat[name] = value if isinstance(value, str | int | float | bool) else str(value)


def code_version(directory: Path) -> dict[str, str]:
    """The release of gspo, and the commits of its sources and of ``directory`` where these are in git."""
    found = {"release": _release(), "python": platform.python_version(), "host": platform.node()}
    # A wheel in an environment inside another repository has no commit, and that repository's is not ours.
    sources = _commit(CHECKOUT) if (CHECKOUT / ".git").exists() else ""
    if sources:
        found["commit"] = sources
    project = _commit(directory)
    if project and project != sources:
        found["project_commit"] = project
    return found


def _release() -> str:
    try:
        return version("gspo")
    except PackageNotFoundError:
        return "unknown"


def _commit(directory: Path) -> str:
    """Return the commit, with "+changes" if files differ from it; empty outside git."""
    git = ["git", "-C", str(directory)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=GIT_S)
        if head.returncode:
            return ""
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
