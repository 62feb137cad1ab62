"""Which connection speaks for a session: one, that of its last accepted Hello."""

from collections.abc import Iterator

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH, WORK, ChannelSpec
from gspo_protocol.codec import Frame, Received, decode, encode
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Goodbye, Heartbeat, Hello, Message, Pulse, Refused, Role, Welcome
from gspo_protocol.messages.gathered import gather
from gspo_services.broker.ledger import Action, Reply, SessionKey
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.sessions import Answer, Arrival, Sessions
from gspo_services.shared.net import Incoming, RouterChannel
from tests.support.broker.ledger import LedgerHarness
from tests.support.builders import an_extension, token_arrays
from tests.support.clocks import VirtualClock
from tests.support.wire.zmq_ends import ANY_PORT

BEAT = Heartbeat(policy_version=0, status="starting", leases=[])


class Connections:
    """Messages from connections, without a network."""

    def __init__(self, channels: dict[ChannelSpec, RouterChannel]) -> None:
        self.world = LedgerHarness()
        self.sessions = Sessions(
            self.world.ledger, channels, BrokerMetrics(CollectorRegistry()), VirtualClock(), lambda _: ""
        )

    def send(self, identity: str, message: Message, key: str = "", spec: ChannelSpec = WORK) -> list[Action]:
        received = Received(message, {}, None)  # type: ignore[arg-type]
        incoming = Incoming(peer=identity.encode(), received=received, key=key.encode())
        actions = self.sessions.actions(Arrival(spec=spec, incoming=incoming), self.world.now)
        self.sessions.forget(self.sessions.gone())
        return actions

    def hello(
        self, identity: str, sender: SessionKey, role: Role = "rollout", key: str = "", spec: ChannelSpec = WORK
    ) -> list[Action]:
        message = Hello(protocol_version=PROTOCOL_VERSION, role=role, peer=sender.peer, session=sender.session)
        return self.send(identity, message, key, spec)


@pytest.fixture
def connections() -> Iterator[Connections]:
    context = zmq.asyncio.Context()
    yield Connections({spec: RouterChannel(context, spec, ANY_PORT) for spec in (WORK, BATCH)})
    context.destroy(linger=0)


def answers(actions: list[Action], kind: type[Message]) -> list[Message]:
    sent = [action.message for action in actions if isinstance(action, Reply | Answer)]
    return [message for message in sent if isinstance(message, kind)]


A, B = SessionKey("rollout-0", "secret-a"), SessionKey("rollout-1", "secret-b")


def test_a_session_has_one_connection_however_often_it_says_hello_over_others(connections: Connections) -> None:
    for number in range(100):
        assert answers(connections.hello(f"identity {number}", A), Welcome)
    assert (connections.sessions.num_routes, connections.sessions.num_connections) == (1, 1)
    route = connections.sessions.route(A)
    assert route is not None
    assert route.identity == b"identity 99"
    assert answers(connections.send("identity 99", BEAT), Pulse)
    (refused,) = answers(connections.send("identity 98", BEAT), Refused)
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("unknown session")


def test_a_connection_speaks_for_the_session_that_was_welcomed_last_over_it(connections: Connections) -> None:
    connections.hello("one", A)
    connections.hello("one", B)
    connections.hello("other", A)
    assert answers(connections.send("one", Goodbye()), Refused) == []
    assert connections.sessions.route(B) is None, "the connection was B's"
    assert connections.sessions.route(A) is not None
    connections.send("other", Goodbye())
    assert (connections.sessions.num_routes, connections.sessions.num_connections) == (0, 0)


@pytest.mark.parametrize(
    ("role", "key", "spec", "why"),
    [
        ("operator", "k", BATCH, "belongs to the role rollout, not to operator"),
        ("learner", "k", BATCH, "belongs to the role rollout, not to learner"),
        ("rollout", "another", WORK, "belongs to another key"),
    ],
)
def test_a_session_stays_with_its_role_and_key(
    connections: Connections, role: Role, key: str, spec: ChannelSpec, why: str
) -> None:
    connections.hello("one", A, key="k")
    former = connections.sessions.route(A)
    (refused,) = answers(connections.hello("two", A, role, key, spec), Refused)
    assert isinstance(refused, Refused)
    assert refused.fatal
    assert why in refused.reason
    assert A.session not in refused.reason, "the session itself is a secret"
    assert connections.sessions.route(A) == former, "nothing has changed"
    assert answers(connections.send("one", BEAT, key="k"), Pulse)
    (stranger,) = answers(connections.send("two", BEAT, key, spec), Refused)
    assert isinstance(stranger, Refused)
    assert stranger.reason.startswith("unknown session")


def test_many_chunks_count_as_many_where_a_rounds_work_is_bounded() -> None:
    def arrival(frames: list[Frame]) -> Arrival:
        return Arrival(spec=WORK, incoming=Incoming(peer=b"r", received=decode(frames)))

    chunk = (an_extension(), token_arrays(3))
    assert arrival(encode(*gather([chunk] * 7), seq=1)).num_events == 7
    assert arrival(encode(*chunk, seq=1)).num_events == 1
    assert Arrival(spec=WORK, incoming=Incoming(peer=b"r", received=None)).num_events == 1
