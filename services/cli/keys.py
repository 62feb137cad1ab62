"""``gspo keys``: makes a key pair for each role or for single peers, and says which process needs which file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.shared.net import KEY_ROLES, KeyFileError, key_role, write_key_pair

NEEDS: Final = """\
Give each process its own directory, as `security.keys`:

  broker     broker.secret     and the public keys of all peers that may connect: learner, operator, rollouts
  learner    learner.secret    and broker.public, and the public keys of the rollouts
  rollout    rollout.secret    and broker.public, learner.public
  gspo run   operator.secret   and broker.public

Public keys are not secret: every process may have all of them. Only the process NAME gets NAME.secret. A rollout started
with --name rollout-7 uses rollout-7.secret if that exists. On one machine all processes can share this directory.
In Kubernetes: one Secret per role and one with the *.public files, mounted together (docs/guide/security.md).\
"""


def keys_command(directory: Path, names: Sequence[str], *, overwrite: bool) -> int:
    """Write the keys of all roles, or only of ``names``. Returns the exit status.

    Raises: ValueError for an invalid name, or for a key that already exists; then nothing is written.
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
            raise KeyFileError(
                f"{path} already exists, and replacing it locks out the process that uses it: --force replaces it"
            )
