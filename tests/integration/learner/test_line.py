"""How many objects are between the learner's service and its socket: a class that only passes calls on is found here."""

import ast
import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import Message, Resume
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.opening import broker_thread
from gspo_services.learner.service import LearnerService
from gspo_services.shared.net.channel import DealerChannel
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import BatchSection, Broker, Learner, Run, Settings
from tests.support.learner.serving_bigram import ServingBigram
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, in_background, zmq_context

LEARNER = Path(__file__).parents[3] / "services/learner"


def ours(frame: FrameType | None) -> Iterator[tuple[int, str]]:
    """The objects whose methods are on this stack, and functions of ours, from the innermost out: identity and name."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("gspo_services."):
            owner = frame.f_locals.get("self")
            yield (id(frame.f_code), frame.f_code.co_qualname) if owner is None else (id(owner), type(owner).__name__)
        frame = frame.f_back


async def test_a_message_passes_five_objects_from_the_training_loop_to_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted while the channel gets the message: whoever is on the stack of its thread, or of the training thread, which
    waits for it."""
    sent, passed = asyncio.Event(), dict[int, str]()
    here, send = asyncio.get_running_loop(), DealerChannel.send

    async def counted(channel: DealerChannel, message: Message, *rest: Any) -> bool:
        if isinstance(message, Resume) and not passed:
            passed[id(channel)] = type(channel).__name__
            passed.update(ours(sys._getframe(1)))
            passed.update(ours(sys._current_frames()[thread.ident or 0]))
            here.call_soon_threadsafe(sent.set)
        return await send(channel, message, *rest)

    monkeypatch.setattr(DealerChannel, "send", counted)
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        settings = Settings(
            run=Run(directory=tmp_path),
            batch=BatchSection(group_size=2, groups_per_batch=4, mini_batches=2),
            broker=Broker(batch_endpoint=end.endpoint),
            learner=Learner(weights_endpoint=ANY_PORT),
        )
        clock, metrics, stop = MonotonicClock(), LearnerMetrics(CollectorRegistry()), threading.Event()
        health = Health(clock, 60.0)

        def train() -> None:
            engine: Any = ServingBigram()
            with broker_thread(settings, session="s", clock=clock, health=health, metrics=metrics) as broker:
                LearnerService(settings, engine, broker, clock=clock, health=health, metrics=metrics, stop=stop).run()

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        await end.welcome(policy_version=0)
        async with in_background(acknowledge_all(end)):
            await sent.wait()
            stop.set()
            await asyncio.to_thread(thread.join, 20.0)
    assert list(reversed(passed.values())) == ["LearnerService", "BrokerThread", "BrokerLoop", "PeerClient", "DealerChannel"]


async def acknowledge_all(end: ScriptedEnd) -> None:
    while True:
        received = await end.receive()
        if received.seq is not None:
            await end.acknowledge(received)


@pytest.mark.parametrize("method", ["tell", "acknowledged", "flush", "wait_for_room"])
def test_only_the_port_its_stand_in_and_the_thread_have_the_calls_of_the_training_loop(method: str) -> None:
    """A class between two of them would have these methods, too."""
    owners = {
        node.name
        for path in LEARNER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        if any(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == method for each in node.body)
    }
    of_other_ranks = {"RankThread"} if method == "wait_for_room" else set()
    assert owners == {"BrokerPort", "NoBroker", "BrokerThread", *of_other_ranks}
