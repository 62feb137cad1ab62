"""The section of the broker."""

from typing import Annotated, Final

from pydantic import Field, SecretStr

from gspo_protocol.limits import MAX_BROKERS, MAX_PART_TOKENS
from gspo_services.shared.settings.exposure import EVERY_ADDRESS
from gspo_services.shared.settings.sections.section import Port, PositiveSeconds, Section

NUMBER_MARK: Final = "{broker}"
"""Stands for the broker's number in an endpoint."""
MAX_PORT: Final = 65_535
PORT_STEP: Final = 100
"""The distance between the ports of two brokers on one host: beyond the ports of one run's other processes."""


class Broker(Section):
    """The durable queue between rollouts and learner."""

    work_endpoint: str = "tcp://127.0.0.1:7001"
    """Rollouts connect here; the broker binds it. With several brokers, broker K has this address with K in place of
    ``{broker}``, or without ``{broker}`` with a port that is 100 K higher. An address that binds every interface stays as it
    is. Several addresses, separated by commas, are those of a broker and its standbys: peers try one after another, and each
    broker sets its own address here."""
    batch_endpoint: str = "tcp://127.0.0.1:7002"
    """The learner and ``gspo run`` connect here; the broker binds it. With several brokers: as work_endpoint."""
    num_brokers: int = Field(1, ge=1, le=MAX_BROKERS)
    """Brokers that share the run: each has a part of the tasks and its own ledger, and contributes its share of each batch.
    Divides batch.groups_per_batch, and stays the same for the whole run."""
    number: int = Field(0, ge=0, lt=MAX_BROKERS)
    """The number of this broker, from 0; only brokers read it. Broker 0 also evaluates."""
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
    """/metrics, /healthz and /readyz; 0: any free port (logged). With several brokers on one host, whose endpoints have no
    ``{broker}``, broker K has this port + 100 K."""

    def work_endpoint_of(self, number: int) -> str:
        """Return the address where rollouts reach broker ``number``."""
        return _of_broker(self.work_endpoint, number)

    def batch_endpoint_of(self, number: int) -> str:
        """Return the address where the learner and operators reach broker ``number``."""
        return _of_broker(self.batch_endpoint, number)

    def metrics_port_of(self, number: int) -> int:
        """Return the port of broker ``number``'s metrics."""
        own_host = NUMBER_MARK in self.work_endpoint or self.work_endpoint.startswith(EVERY_ADDRESS)
        return self.metrics_port if own_host or not self.metrics_port else self.metrics_port + PORT_STEP * number

    @property
    def work_endpoints(self) -> tuple[str, ...]:
        """The addresses of all brokers, in order."""
        return tuple(map(self.work_endpoint_of, range(self.num_brokers)))

    @property
    def batch_endpoints(self) -> tuple[str, ...]:
        """The addresses of all brokers, in order."""
        return tuple(map(self.batch_endpoint_of, range(self.num_brokers)))


def _of_broker(endpoint: str, number: int) -> str:
    """Return a broker's endpoint. Raises: ValueError for an endpoint that leaves no room for several brokers."""
    if "," in endpoint:  # A broker and its standbys.
        return ",".join(_of_broker(each.strip(), number) for each in endpoint.split(","))
    if NUMBER_MARK in endpoint:
        return endpoint.replace(NUMBER_MARK, str(number))
    if not number or endpoint.startswith(EVERY_ADDRESS):
        return endpoint  # A broker that binds every interface is on its own host.
    address, _, port = endpoint.rpartition(":")
    if not port.isdigit() or int(port) + PORT_STEP * number > MAX_PORT:
        raise ValueError(
            f"{endpoint!r} gives broker {number} no separate address: write {NUMBER_MARK} where its number belongs, such "
            f"as tcp://broker-{NUMBER_MARK}:7001, or a port with room above it"
        )
    return f"{address}:{int(port) + PORT_STEP * number}"
