"""Messages of the batch channel, operator <-> broker: to watch a run, to stop it, to requeue what it has quarantined."""

from typing import Annotated, ClassVar

from msgspec import Meta

from gspo_protocol import limits
from gspo_protocol.messages.base import (
    Count,
    Message,
    Plain,
    Reason,
    require_plain,
)


class StatusRequest(Message, frozen=True, tag="status_request"):
    """Operator (``gspo run``) -> broker: what is the state of the run?"""


class Status(Message, frozen=True, tag="status"):
    """Broker -> operator: the state of the run, plain data for display."""

    LARGE_HEADER: ClassVar[bool] = True

    status: Plain

    def check_plain(self) -> None:
        require_plain("status", self.status)


class StopRequest(Message, frozen=True, tag="stop_request"):
    """Operator -> broker: finish the batch under way and stop the run."""

    reason: Reason


class RequeueRequest(Message, frozen=True, tag="requeue_request"):
    """Operator (``gspo requeue``) -> broker: use the groups of these quarantined batches again; of all if none is named."""

    batches: Annotated[list[Count], Meta(max_length=limits.MAX_BATCHES_REQUEUED)]
