"""The section of keys and addresses."""

from gspo_services.shared.settings.sections.section import OptionalPath, Section


class SecuritySection(Section):
    """Which processes may join the run; see docs/guide/security.md."""

    keys: OptionalPath = ""
    """Directory with this process's secret key and every peer's public key; ``gspo keys DIRECTORY`` makes one. Every socket
    is then encrypted, and only listed keys are admitted. Empty: no keys, and every endpoint must be private to this host."""
    allow_plaintext: bool = False
    """Allow endpoints without keys that other hosts can reach. Any process that reaches them can join and read the run."""
    metrics_host: str = "127.0.0.1"
    """The address of /metrics, /healthz and /readyz. 127.0.0.1: only this host. 0.0.0.0: every interface, as Kubernetes's
    probes and Prometheus need. These pages are read-only, and neither encrypted nor authenticated."""
