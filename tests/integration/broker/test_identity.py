"""Who a peer is: sessions of a real broker with keys belong to those that opened them, and nobody else hears their names."""

import json
from pathlib import Path

import zmq.asyncio

from gspo_protocol.channels import BATCH, WORK
from gspo_protocol.limits import MAX_ROLLOUTS_PER_KEY, PROTOCOL_VERSION
from gspo_protocol.messages import (
    Ack,
    BatchPending,
    BatchRequest,
    Goodbye,
    Hello,
    Published,
    Refused,
    Role,
    Status,
    StatusRequest,
    Welcome,
)
from gspo_protocol.sessions import new_session, session_tag
from tests.support.broker.process import scraped
from tests.support.wire.keys import make_keys, security_of
from tests.support.wire.secured import answer, ask, connection, secured_broker, without_commit


def a_hello(role: Role, peer: str, session: str) -> Hello:
    return Hello(protocol_version=PROTOCOL_VERSION, role=role, peer=peer, session=session)


async def test_an_operator_that_knows_the_learners_session_cannot_act_as_the_learner(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    keys = make_keys(tmp_path / "keys")
    session = new_session()
    async with (
        secured_broker(tmp_path, keys) as broker,
        connection(context, BATCH, broker, security_of(keys, "learner"), f"learner/{session}") as learner,
        connection(context, BATCH, broker, security_of(keys, "operator"), "thief") as thief,
    ):
        assert isinstance(await ask(learner, a_hello("learner", "learner", session)), Welcome)
        refused = await ask(thief, a_hello("operator", "learner", session))
        assert isinstance(refused, Refused)
        assert refused.fatal
        assert "belongs to the role learner, not to operator" in refused.reason
        refused = await ask(thief, BatchRequest(index=0, policy_version=1))
        assert isinstance(refused, Refused)
        assert refused.reason.startswith("unknown session")
        published = Published(policy_version=1, endpoint="ipc://w", digest="d", num_bytes=1, trained_batches=0, vocabulary=9)
        await learner.send(published, seq=0)
        assert without_commit(await answer(learner)) == Ack(next_seq=1, session=session)
        assert isinstance(await ask(learner, BatchRequest(index=0, policy_version=1)), BatchPending)
        await scraped(broker, 'gspo_broker_refused_connections_total{reason="impostor"} 1.0')


async def test_nobody_is_told_the_session_of_another(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    keys = make_keys(tmp_path / "keys")
    sessions = {name: new_session() for name in ("learner", "rollout-0", "standby", "operator")}
    said: list[str] = []
    async with (
        secured_broker(tmp_path, keys) as broker,
        connection(context, BATCH, broker, security_of(keys, "learner"), f"learner/{sessions['learner']}") as learner,
        connection(context, WORK, broker, security_of(keys, "rollout"), f"rollout-0/{sessions['rollout-0']}") as rollout,
        connection(context, BATCH, broker, security_of(keys, "learner"), f"standby/{sessions['standby']}") as standby,
        connection(context, BATCH, broker, security_of(keys, "operator"), "operator") as operator,
    ):
        await ask(learner, a_hello("learner", "learner", sessions["learner"]))
        await ask(rollout, a_hello("rollout", "rollout-0", sessions["rollout-0"]))
        taken = await ask(standby, a_hello("learner", "standby", sessions["standby"]))
        assert isinstance(taken, Refused)
        said.append(taken.reason)
        await ask(operator, a_hello("operator", "o", sessions["operator"]))
        status = await ask(operator, StatusRequest())
        assert isinstance(status, Status)
        assert status.status["learner_session"] == session_tag(sessions["learner"])
        assert status.status["learner_waiting"] == session_tag(sessions["standby"])
        said.append(json.dumps(status.status))
        await rollout.send(BatchRequest(index=0, policy_version=1))
        said.append(str(await answer(rollout)).partition("session=")[0])
        await rollout.send(Goodbye())
        await broker.logged("goodbye")
        assert isinstance(await ask(rollout, Goodbye()), Refused)
        await broker.logged("message_refused")
        said.append(json.dumps(broker.events))
        for session in sessions.values():
            assert session not in "".join(said)


async def test_an_operator_with_a_rollouts_name_does_not_end_the_rollout(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    keys = make_keys(tmp_path / "keys")
    async with (
        secured_broker(tmp_path, keys) as broker,
        connection(context, WORK, broker, security_of(keys, "rollout"), "rollout-0") as rollout,
        connection(context, BATCH, broker, security_of(keys, "operator"), "rollout-0") as operator,
    ):
        await ask(rollout, a_hello("rollout", "rollout-0", new_session()))
        await ask(operator, a_hello("operator", "rollout-0", new_session()))
        await operator.send(Goodbye())
        await broker.logged("goodbye")
        await ask(operator, a_hello("operator", "watcher", new_session()))
        status = await ask(operator, StatusRequest())
        assert isinstance(status, Status)
        assert [each["status"] for each in status.status["rollouts"]] == ["starting"]
        assert status.status["rollouts_gone"] == []


SESSIONS = 4096


async def test_thousands_of_sessions_of_one_key_shut_out_neither_the_learner_nor_an_operator(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    keys = make_keys(tmp_path / "keys")
    make_keys(keys, ["rollout-greedy"])
    greedy_key = security_of(keys, "rollout", "rollout-greedy")
    async with (
        secured_broker(tmp_path, keys) as broker,
        connection(context, BATCH, broker, security_of(keys, "learner"), "first") as first,
        connection(context, WORK, broker, greedy_key, "greedy") as greedy,
        connection(context, BATCH, broker, security_of(keys, "learner"), "second") as second,
        connection(context, BATCH, broker, security_of(keys, "operator"), "watcher") as watcher,
        connection(context, WORK, broker, security_of(keys, "rollout"), "honest") as honest,
    ):
        assert isinstance(await ask(first, a_hello("learner", "learner", new_session())), Welcome)
        # The first ones get sessions. Then the key is not heard for a while: nobody has to answer it.
        assert isinstance(await ask(greedy, a_hello("rollout", "rollout-greedy", new_session())), Welcome)
        for number in range(SESSIONS):
            await greedy.send(a_hello("rollout", f"rollout-greedy-{number}", new_session()))
        await first.send(Goodbye())
        assert isinstance(await ask(second, a_hello("learner", "learner", new_session())), Welcome)
        assert isinstance(await ask(honest, a_hello("rollout", "rollout-0", new_session())), Welcome)
        assert isinstance(await ask(watcher, a_hello("operator", "watcher", new_session())), Welcome)
        status = await ask(watcher, StatusRequest())
        assert isinstance(status, Status)
        assert status.status["learner"] == "learner"
        assert 1 < len(status.status["rollouts"]) <= MAX_ROLLOUTS_PER_KEY + 1
        assert broker.count("hello") < 1000, "the log stays bounded"
