"""How long a call waits for a broker that acknowledges nothing."""

from collections.abc import Coroutine
from typing import Any, NoReturn

import pytest

from gspo_protocol.messages import Trained
from gspo_services.learner.broker.thread import CALL_TIMEOUT_S, BrokerThread
from gspo_services.shared.runtime.errors import ServiceError


class StuckLoop:
    """Computes digests for the first ``num_busy`` looks; nothing is ever acknowledged."""

    endpoint = "tcp://broker:7002"

    def __init__(self, num_busy: int) -> None:
        self._num_busy = num_busy

    @property
    def encoding(self) -> bool:
        self._num_busy -= 1
        return self._num_busy >= 0

    async def has_room(self) -> None: ...
    async def flushed(self) -> None: ...
    async def send(self, message: Trained) -> None: ...


class Waiting(BrokerThread):
    """Every call times out."""

    def __init__(self, num_busy: int = 0) -> None:
        self._loop = StuckLoop(num_busy)  # type: ignore[assignment]
        self.waited: list[float] = []

    def _next_arrival(self, timeout_s: float) -> None:
        return None

    def _call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> NoReturn:
        coroutine.close()
        self.waited.append(timeout_s)
        raise TimeoutError


def test_flush_gives_the_broker_its_time_again_while_digests_are_computed() -> None:
    client = Waiting(num_busy=2)
    assert client.flush(10.0) is False
    assert client.waited == [10.0, 10.0, 10.0]


def test_a_broker_that_acknowledges_nothing_is_named_when_a_publication_waits_for_it() -> None:
    client = Waiting(num_busy=1)
    with pytest.raises(ServiceError, match="the broker at tcp://broker:7002 has acknowledged nothing for 600 s"):
        client.wait_for_room()
    assert client.waited == [CALL_TIMEOUT_S, CALL_TIMEOUT_S]


def test_a_broker_that_acknowledges_nothing_is_named_when_a_report_waits_for_it() -> None:
    client = Waiting()
    with pytest.raises(ServiceError, match="is it running"):
        client.tell(Trained(index=0, policy_version=1, metrics={}))
    assert client.waited == [CALL_TIMEOUT_S]
