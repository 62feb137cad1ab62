"""`gspo keys`: one key pair per role, or for single peers, and who needs which file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.runtime.net import KEY_ROLES, KeyFileError, key_role, write_key_pair

NEEDS: Final = """\
Give each process a directory of its own, as `security.keys`:

  broker     broker.secret     and the public keys of all that may connect: learner, operator, rollouts
  learner    learner.secret    and broker.public, and the public keys of the rollouts
  rollout    rollout.secret    and broker.public, learner.public
  gspo run   operator.secret   and broker.public

Public keys are no secret: the same set may lie everywhere. A NAME.secret goes to that process alone; a rollout started with
--name rollout-7 uses rollout-7.secret where there is one. On one machine the directory serves all as it is.
In Kubernetes: one Secret per role and one with the *.public files, mounted together (docs/guide/security.md).\
"""


def keys_command(directory: Path, names: Sequence[str], *, overwrite: bool) -> int:
    """Write the keys of all roles, or of ``names`` alone. Returns the exit status.

    Raises: ValueError for a name that is none, or a key that is there already; nothing is written then.
    """
    wanted = list(names) or list(KEY_ROLES)
    for name in wanted:
        key_role(name)
        if not overwrite:
            _require_absent(directory, name)
    for name in wanted:
        secret, public = write_key_pair(directory, name, overwrite=overwrite)
        print(f"{secret}  {public}")
    print(f"\n{NEEDS}")
    return 0


def _require_absent(directory: Path, name: str) -> None:
    for path in (directory / f"{name}.secret", directory / f"{name}.public"):
        if path.exists():
            raise KeyFileError(f"{path} is there already: whoever uses it would be locked out; --force replaces it")
