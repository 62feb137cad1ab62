"""Messages of the batch channel, operator <-> broker: to watch a run and to stop it."""

from typing import ClassVar

from protocol.messages.base import (
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
