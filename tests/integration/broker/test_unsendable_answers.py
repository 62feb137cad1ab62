"""An answer that cannot be sent, or that nobody could decode, is a refusal that says so, and the broker goes on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH, WORK
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Hello, Refused, Status, StatusRequest, Welcome
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.metrics_file import MetricsFile
from gspo_services.broker.service import BrokerService
from gspo_services.shared.net import RouterChannel
from gspo_services.shared.net.channel import DealerChannel
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from tests.support.broker.ledger import LedgerHarness
from tests.support.wire.secured import ask
from tests.support.wire.zmq_ends import ANY_PORT


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"in": value}
    return value


@pytest.mark.parametrize(
    ("status", "limit"),
    [
        ({"rollouts": "x" * (17 * 1024 * 1024)}, "MAX_LARGE_HEADER_BYTES"),
        (deep(70), "MAX_PLAIN_DEPTH"),
        ({"batch": 2**70}, "OverflowError|too large|64-bit|out of range|Integer"),
    ],
)
async def test_an_answer_that_no_receiver_could_take_is_refused_with_the_limit_and_the_broker_lives(
    tmp_path: Path, context: zmq.asyncio.Context, status: dict[str, Any], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, world = MonotonicClock(), LedgerHarness(path=tmp_path / "ledger.sqlite3", now=MonotonicClock().now())
    channels = {spec: RouterChannel(context, spec, ANY_PORT) for spec in (WORK, BATCH)}
    broker = BrokerService(
        world.ledger,
        world.store,
        channels,
        {},
        MetricsFile(tmp_path / "metrics.jsonl"),
        BrokerMetrics(CollectorRegistry()),
        Health(clock, 60.0),
        clock,
        clock.now,
        commit_interval_s=0.0,
        part_tokens=2**18,
    )
    operator = DealerChannel(context, BATCH, channels[BATCH].endpoint, "o")
    stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broker.run(stop))
            hello = Hello(protocol_version=PROTOCOL_VERSION, role="operator", peer="o", session="s")
            assert isinstance(await ask(operator, hello), Welcome)
            with monkeypatch.context() as patch:
                patch.setattr(world.ledger, "status", lambda now: status)
                refused = await ask(operator, StatusRequest())
            assert isinstance(refused, Refused)
            assert refused.reason.startswith("status: the broker cannot send its answer: ")
            assert any(word in refused.reason for word in limit.split("|")), refused.reason
            assert isinstance(await ask(operator, StatusRequest()), Status)
            stop.set()
    finally:
        operator.close(linger_ms=0)
        for channel in channels.values():
            channel.close()
        world.store.close()
