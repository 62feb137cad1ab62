"""The keys of a run: a process's own key, the keys of peers it connects to, and the keys it admits.

A directory holds ``NAME.secret`` and ``NAME.public`` files, one CURVE key in Z85 each. NAME is a role (broker, learner,
rollout, operator), optionally with a dash and a suffix (rollout-7, operator-alice). The public files are the allow-list.
Without a directory nothing is encrypted, and only endpoints that no other host reaches are used.
"""

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import structlog
import zmq
from zmq.utils import z85

from gspo_protocol.messages import Role
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import EXPOSED, SecuritySection, is_private

log = structlog.get_logger()

KeyRole = Literal["broker", "learner", "rollout", "operator"]
KEY_ROLES: Final[tuple[KeyRole, ...]] = ("broker", "learner", "rollout", "operator")
Z85_CHARS: Final = 40
MAX_KEYS: Final = 16_384
_NAME: Final = re.compile(rf"({'|'.join(KEY_ROLES)})(-[A-Za-z0-9][A-Za-z0-9_.-]*)?")


class KeyFileError(ValueError):
    """A key file cannot be used; the text names the file and what to do, and never a secret."""


@dataclass(frozen=True, kw_only=True)
class OwnKey:
    """The key pair of this process, in Z85."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)


def key_role(name: str) -> KeyRole:
    """Return the role of a key's name, such as rollout for "rollout-7". Raises: ValueError for a name without a role."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"key name {name!r}: expected a role ({', '.join(KEY_ROLES)}), or a role, a dash and letters, digits, dots, "
            "dashes or underscores, such as rollout-7"
        )
    role: KeyRole = match[1]  # type: ignore[assignment]
    return role


def read_public_keys(directory: Path) -> dict[bytes, str]:
    """Return the name of each ``NAME.public`` in ``directory``, by its Z85 key.

    Raises: KeyFileError for a directory or file that cannot be used, for a key under two names, or for too many.
    """
    names: dict[bytes, str] = {}
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".public")
    except OSError as error:
        raise KeyFileError(f"security.keys is {directory}: {error.strerror}; `gspo keys {directory}` makes one") from error
    if len(paths) > MAX_KEYS:
        raise KeyFileError(f"{directory}: {len(paths)} public keys, {MAX_KEYS} allowed (MAX_KEYS): remove old ones")
    for path in paths:
        try:
            key_role(path.stem)
        except ValueError as error:
            raise KeyFileError(f"{path}: {error}") from error
        key = _read_key(path)
        if key in names:
            raise KeyFileError(f"{path} and {names[key]}.public hold the same key: every name needs its own")
        names[key] = path.stem
    return names


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}; `gspo keys {path.parent}` makes keys") from error
    # The file's content is not quoted: it may be a secret in the wrong place.
    if len(key) != Z85_CHARS:
        raise KeyFileError(f"{path}: holds {len(key)} characters, a key has {Z85_CHARS} (Z85)")
    try:
        z85.decode(key)
    except (KeyError, ValueError, struct.error) as error:
        raise KeyFileError(f"{path}: is not a key in Z85") from error
    return key


def _read_own_key(directory: Path, role: KeyRole, name: str) -> OwnKey:
    """Read the key of ``name`` if it has its own, otherwise its role's."""
    own = name if _NAME.fullmatch(name) is not None and (directory / f"{name}.secret").is_file() else role
    path = directory / f"{own}.secret"
    secret = _read_key(path)
    if path.stat().st_mode & 0o007:
        log.warning("secret_key_readable_by_everybody", file=str(path), way_out="chmod 600, or a Secret's defaultMode 0440")
    return OwnKey(name=own, public=zmq.curve_public(secret), secret=secret)


@dataclass(frozen=True, kw_only=True)
class Security:
    """How one process secures its sockets.

    ``own`` is None without keys: then endpoints must be private to this host, unless ``allow_plaintext``.
    """

    own: OwnKey | None = None
    directory: Path | None = None
    allow_plaintext: bool = False
    server: bytes = b""
    """The public key of the binding end, if that has one of its own; see ``with_server``."""

    @classmethod
    def load(cls, section: SecuritySection, role: KeyRole, name: str = "") -> "Security":
        """Load the security of process ``name`` with this role. Raises: ConfigurationError with the file and what to do."""
        if not section.keys:
            return cls(allow_plaintext=section.allow_plaintext)
        directory = Path(section.keys)
        try:
            own = _read_own_key(directory, role, name or role)
            if own.public not in read_public_keys(directory):
                log.warning("own_public_key_missing", file=str(directory / f"{own.name}.public"))
        except KeyFileError as error:
            raise ConfigurationError(f"security.keys: {error}") from error
        return cls(own=own, directory=directory, allow_plaintext=section.allow_plaintext)

    def objection(self, endpoint: str) -> str:
        """Say why ``endpoint`` must not be used, and both remedies; empty when it may be."""
        if self.own is not None or self.allow_plaintext or is_private(endpoint):
            return ""
        return f"endpoint {endpoint!r}: {EXPOSED}"

    def with_server(self, role: KeyRole, key: str) -> "Security":
        """The same, for connecting to one of several binding ends of a role: the one with ``key`` (Z85; empty without keys).

        Raises: KeyFileError when no such process has that key here, or when only one of the two has keys.
        """
        if self.own is None and not key:
            return self
        if self.own is None or self.directory is None:
            raise KeyFileError(f"a {role} was named with a key and this process has none: set security.keys")
        name = read_public_keys(self.directory).get(key.encode(), "")
        if not name or key_role(name) != role:
            raise KeyFileError(f"the key {key!r} is not that of a {role}: put its public file into {self.directory}")
        return replace(self, server=key.encode())

    def server_key(self, role: str) -> bytes:
        """Return the public key of the binding end. Raises: KeyFileError."""
        if self.server:
            return self.server
        assert self.directory is not None
        return _read_key(self.directory / f"{role}.public")


PLAINTEXT: Final = Security()
"""No keys: only endpoints of this host may be used."""


class AllowList:
    """The admitted keys, and the names that each key may use. Pure: ``replace`` the names when the files change."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self.replace(names)

    def replace(self, names: Mapping[bytes, str]) -> None:
        """Admit ``names`` (by Z85 key) from now on, and no other key."""
        self._names = dict(names)
        # A peer belongs to the longest name that fits it.
        self._own = sorted((name for name in self._names.values() if name not in KEY_ROLES), key=len, reverse=True)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, key: bytes) -> str:
        """Return the name of a key; empty when it is not listed."""
        return self._names.get(key, "")

    def admits(self, key: bytes, roles: tuple[str, ...]) -> bool:
        """Return whether the key is listed under one of ``roles``."""
        name = self.name(key)
        return bool(name) and key_role(name) in roles

    def objection(self, key: bytes, role: Role, peer: str) -> str:
        """Say why the owner of ``key`` must not act as ``peer`` with ``role``; empty when it may."""
        name = self.name(key)
        if not name:
            return "its key is not in the allow-list (any more)"
        if key_role(name) != role:
            return f"the key {name} belongs to a {key_role(name)} and cannot act as a {role}"
        owner = next((own for own in self._own if key_role(own) == role and _fits(own, peer)), role)
        if name != owner:
            return f"the key {name} cannot speak for {peer}, which has the key {owner}"
        return ""


def _fits(name: str, peer: str) -> bool:
    """Whether the key ``name`` serves ``peer``: the peer of that name, or with a suffix, as rollout-a serves rollout-a-3."""
    return peer == name or peer.startswith(f"{name}-")


def write_key_pair(directory: Path, name: str, *, overwrite: bool) -> tuple[Path, Path]:
    """Make a key pair: ``NAME.secret`` (mode 0600) and ``NAME.public``, each written whole or not at all.

    Returns both paths. Raises: KeyFileError when one exists and ``overwrite`` is false, or when one cannot be written.
    """
    key_role(name)
    public, secret = zmq.curve_keypair()
    secret_path, public_path = directory / f"{name}.secret", directory / f"{name}.public"
    for path in (secret_path, public_path):
        if path.exists() and not overwrite:
            raise KeyFileError(
                f"{path} exists already, and replacing it locks out the process that uses it: --force replaces it"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(secret_path, secret, 0o600)
        _write(public_path, public, 0o644)
    except OSError as error:
        raise KeyFileError(f"{error.filename or directory}: {error.strerror}") from error
    return secret_path, public_path


def _write(path: Path, key: bytes, mode: int) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    # No other process can have it open: it is made here, with its final mode, and never follows a link.
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        os.write(file, key + b"\n")
        os.fsync(file)
    finally:
        os.close(file)
    partial.replace(path)
