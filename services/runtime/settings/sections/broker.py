"""The section of the broker."""

from typing import Annotated

from pydantic import Field

from services.runtime.settings.sections.section import Port, PositiveSeconds, Section


class Broker(Section):
    """The durable queue between rollouts and learner."""

    work_endpoint: str = "tcp://127.0.0.1:7001"
    """Rollouts connect here; the broker binds it."""
    batch_endpoint: str = "tcp://127.0.0.1:7002"
    """The learner and ``gspo run`` connect here; the broker binds it."""
    lease_s: PositiveSeconds = 15.0
    """A lease that is not renewed for this long ends. Another rollout continues its trajectory from the last acknowledged
    token."""
    max_attempts: int = Field(4, ge=1)
    """A trajectory that fails this many times is dropped with its group, and reported. Being handed back or lost is
    not a failure."""
    commit_interval_s: Annotated[float, Field(ge=0, le=1)] = 0.005
    """How long messages are gathered before one commit and its acknowledgements."""
    failure_budget: int = Field(20, ge=1)
    """The run stops, and says why, after this many groups in a row were dropped because they failed."""
    metrics_port: Port = 9101
    """/metrics, /healthz and /readyz; 0: any free port (logged)."""
