"""The section of the broker."""

from typing import Annotated

from pydantic import Field, SecretStr

from gspo_protocol.limits import MAX_PART_TOKENS
from gspo_services.shared.settings.sections.section import Port, PositiveSeconds, Section


class Broker(Section):
    """The durable queue between rollouts and learner."""

    work_endpoint: str = "tcp://127.0.0.1:7001"
    """Rollouts connect here; the broker binds it. Several addresses, separated by commas, are those of a broker and its
    standbys: peers try one after another, and each broker sets its own address here."""
    batch_endpoint: str = "tcp://127.0.0.1:7002"
    """The learner and ``gspo run`` connect here; the broker binds it. Several addresses: as work_endpoint."""
    lease_s: PositiveSeconds = 15.0
    """A lease that is not renewed for this long ends. Another rollout continues its trajectory from the last acknowledged
    token."""
    idle_lease_s: PositiveSeconds = 900.0
    """A lease under which no new token is acknowledged for this long ends too, however often it is renewed, and counts as a
    failed attempt: nobody holds up a batch for ever. Longer than rollout.engine_timeout_s and than an episode's longest tool
    call or reward."""
    max_attempts: int = Field(4, ge=1)
    """A trajectory that fails this many times is dropped with its group, and reported. Being handed back or lost is
    not a failure; but one that ends three rollouts, before a new token of it, is dropped, too."""
    commit_interval_s: Annotated[float, Field(ge=0, le=1)] = 0.005
    """How long messages are gathered before one commit and its acknowledgements."""
    batch_part_tokens: int = Field(262_144, ge=1, le=MAX_PART_TOKENS)
    """A batch goes to the learner in parts of this many tokens, of 8 bytes each. The broker has one part in memory at a
    time, and serves rollouts between two parts."""
    database: SecretStr | None = None
    """A PostgreSQL database that has every commit before it is acknowledged, so that a standby can take over (see
    docs/guide/brokers.md): postgresql://user@host1,host2/name, or host=... dbname=.... The password may be in this setting,
    in PGPASSWORD or in a password file; it is never shown. Not set: the ledger is only in run.directory."""
    database_schema: str = Field("gspo", pattern=r"^[a-z][a-z0-9_]{0,50}$")
    """The beginning of the name of the schema with the run's log in that database. Each run needs a different one."""
    takeover_s: Annotated[float, Field(ge=2, le=600)] = 5.0
    """A standby takes over when the leader has not renewed its place for this long. A leader that ends in order gives it up
    at once."""
    allow_asynchronous_database: bool = False
    """Also accept a database that does not wait for a second machine. Its failover can then lose acknowledged data."""
    keep_batches: int = Field(64, ge=0)
    """The tokens of this many of the newest batches stay in the ledger. Tokens of older batches that a checkpoint covers
    move to compressed files in the run's archive/; audit, replay and learner read both. 0, or with broker.database: all
    stay."""
    archive_file_mib: Annotated[float, Field(gt=0, le=4096)] = 64.0
    """Tokens and log-probs in one file of the archive, in MiB before compression. It is written when there are as many."""
    failure_budget: int = Field(20, ge=1)
    """The run stops with an error after this many groups in a row were dropped because they failed."""
    metrics_port: Port = 9101
    """/metrics, /healthz and /readyz; 0: any free port (logged)."""
