"""Keys of a run, for tests: one directory with the keys of all roles."""

import re
from collections.abc import Iterable
from pathlib import Path

from gspo_services.shared.net.security import KEY_ROLES, KeyRole, Security, write_key_pair
from gspo_services.shared.settings.sections import SecuritySection


def make_keys(directory: Path, names: Iterable[str] = KEY_ROLES) -> Path:
    for name in names:
        write_key_pair(directory, name, overwrite=False)
    return directory


def security_of(directory: Path, role: KeyRole, name: str = "") -> Security:
    return Security.load(SecuritySection(keys=str(directory)), role, name)


def secrets_in(directory: Path) -> list[str]:
    """Every secret key of a directory. None may be found anywhere else."""
    return [path.read_text().strip() for path in directory.glob("*.secret")]


def counted(metrics: str, name: str, **labels: str) -> float:
    """A sample of the Prometheus text; 0 when it is not there."""
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    sample = f"{name}{{{inside}}}" if labels else name
    found = re.search(rf"^{re.escape(sample)} (\S+)$", metrics, re.MULTILINE)
    return 0.0 if found is None else float(found[1])
