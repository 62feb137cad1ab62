"""The section of sandboxes, where programs of the policy run."""

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from gspo_services.shared.settings.sections.section import OptionalPath, Port, PositiveSeconds, Section


class SandboxSection(Section):
    """Where programs of the policy run: in bubblewrap beside each rollout, or on servers (``gspo sandbox``).

    See docs/guide/sandbox.md.
    """

    urls: list[str] = Field([])
    """Servers, such as ["http://gspo-sandbox:7010"]; several are taken in turn. Empty: bubblewrap on the rollout's own
    machine. A key that servers ask for is in the variable GSPO_SANDBOX_KEY."""
    acquire_timeout_s: PositiveSeconds = 300.0
    """Seconds for which a rollout tries again when servers are busy, stop or die. Then the attempt fails, and nothing is
    scored."""
    max_sandboxes: int = Field(0, ge=0, le=1024)
    """Sandboxes at a time, of a server, and of each rollout without one. 0: one for each processor."""
    warm: int = Field(2, ge=0, le=64)
    """Sandboxes that are started before anybody asks; each takes about 15 MB."""
    python: OptionalPath = ""
    """The interpreter for "python", such as "/opt/python3.13/bin/python3". Empty: the one that gspo runs in, without the
    packages of its virtual environment."""
    read_only: list[str] = Field([])
    """Folders beside the system's that programs may read, at their own places, such as ["/opt/compilers"]."""
    host: str = "127.0.0.1"
    """Address that a server listens on. Any other than loopback needs GSPO_SANDBOX_KEY, or security.allow_plaintext if
    nobody else can reach it."""
    port: Port = 7010
    """Port that a server listens on."""
    metrics_port: Port = 9104
    """Port of a server's /metrics, /healthz and /readyz, on security.metrics_host. 0: any free port."""
    max_waiting: int = Field(256, ge=0, le=65536)
    """Sandboxes that may be waited for at a server. Whoever comes then is told to try again later, or elsewhere."""
    max_wall_s: PositiveSeconds = 120.0
    """The most wall-clock and processor seconds that a server gives one program; a request for more is refused."""
    max_memory_bytes: int = Field(4 * 2**30, ge=2**20)
    """Memory that a server gives one program, at most. ``max_sandboxes`` times as much must be there."""
    idle_s: PositiveSeconds = 60.0
    """Seconds after which a server ends a sandbox that nobody has asked for anything."""
    drain_s: PositiveSeconds = 30.0
    """Seconds that sandboxes in use have to end after SIGTERM. Clients then run their programs on another server."""

    @field_validator("urls")
    @classmethod
    def _urls_are_addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
                raise ValueError(f"sandbox.urls holds {url[:200]!r}: expected http://HOST:PORT")
            if parts.username or parts.password:
                raise ValueError("sandbox.urls holds a user or a password: put the key into the variable GSPO_SANDBOX_KEY")
        return urls

    @field_validator("python", "read_only")
    @classmethod
    def _paths_are_whole(cls, given: str | list[str]) -> str | list[str]:
        for path in [given] if isinstance(given, str) else given:
            if (path and not path.startswith("/")) or "/../" in f"{path}/":
                raise ValueError(f"{path[:200]!r}: expected a path that begins with / and has no ..")
        return given
