"""The broker as a process behind real sockets: whole runs, kill -9 in mid-stream, bad peers, a disk that refuses."""

import asyncio
import resource
from collections.abc import Awaitable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import Heartbeat, Published
from gspo_protocol.sessions import session_tag
from gspo_services.shared.net.peer import PeerClient
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import ReplacedError, flatten
from tests.support.broker.batch_rows import RUN_TIMEOUT_S, rows_of_batches
from tests.support.broker.peers import PROMPT_TOKENS, ScriptedLearner, ScriptedRollout, tokens_of
from tests.support.broker.process import BrokerDidNotStart, BrokerProcess, broker_process, eventually, scraped
from tests.support.wire.keys import counted
from tests.support.wire.zmq_ends import a_client


async def quiet_s(broker: BrokerProcess) -> float:
    return counted((await broker.http("/metrics"))[1], "gspo_broker_quiet_seconds")


async def test_a_run_end_to_end(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path, evaluation={"every_batches": 2, "num_tasks": 3}) as broker:
        rollouts = [ScriptedRollout(context, broker.work_endpoint, f"r{index}", "s") for index in range(2)]
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")
        begin_s, quiet_at_begin_s = MonotonicClock().now(), await quiet_s(broker)
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for rollout in rollouts:
                tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
        assert learner.end is not None
        assert learner.end.reason == "all 4 batches are trained"
        assert 0.0 <= await quiet_s(broker) < quiet_at_begin_s + MonotonicClock().now() - begin_s - 0.1
        assert [batch.index for batch, _ in learner.batches] == [0, 1, 2, 3]
        for batch, tokens in learner.batches:
            assert tokens == [token for item in batch.items for token in tokens_of(item.trajectory_id, item.num_tokens)]
            assert {item.temperature for item in batch.items} == {1.0}
        assert await broker.http("/readyz") == (200, "ready\n")
        await scraped(broker, "gspo_broker_batches_assembled 4.0", 'gspo_broker_groups{state="batched"} 8.0')
        assert await broker.terminate() == 0
    events = [(line["event"], line["batch"]) for line in broker.metrics_lines()]
    assert [event for event in events if event[0] == "batch"] == [("batch", index) for index in range(4)]
    assert [event for event in events if event[0] == "eval"] == [("eval", 0), ("eval", 2), ("eval", 4)]
    assert len(rows_of_batches(broker, 4)) == 4


async def test_kill_9_in_mid_stream_loses_nothing_that_was_acknowledged(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    num_kills = 3
    async with broker_process(tmp_path, run={"num_batches": 8}) as broker:
        rollouts = [
            ScriptedRollout(context, broker.work_endpoint, f"r{index}", "s", action_tokens=37, chunk_delay_s=0.02)
            for index in range(2)
        ]
        learner = ScriptedLearner(context, broker.batch_endpoint, "s", train_s=0.05)

        async def kill_repeatedly() -> None:
            for number in range(1, num_kills + 1):
                enough = 80 * number  # of 352 in all
                await eventually(lambda: sum(len(rollout.chunks) for rollout in rollouts) > enough)  # noqa: B023
                await eventually(lambda: any(rollout.episodes_under_way for rollout in rollouts))
                await broker.kill()
                await broker.start()

        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_repeatedly())
            for rollout in rollouts:
                tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
        assert broker.count("broker_started") == num_kills + 1
        assert all(rollout.handshakes >= num_kills + 1 for rollout in rollouts)
        assert [batch.index for batch, _ in learner.batches] == list(range(8))
        assert await broker.terminate() == 0
    assert broker.count("attempt_failed") == 0, "a lost chunk leaves a gap, and a gap is a failed attempt"
    given = {(lease.trajectory_id, lease.epoch) for rollout in rollouts for lease in rollout.seen_leases}
    expired = {(line["trajectory_id"], line["epoch"]) for line in broker.events if line["event"] == "lease_expired"}
    assert not expired & given, "a lease may expire if a kill kept it from its rollout"
    batches = rows_of_batches(broker, 8)
    trained = [row.trajectory_id for rows in batches for row in rows]
    assert len(set(trained)) == len(trained) == 8 * 4
    assert {row.num_tokens for rows in batches for row in rows} == {PROMPT_TOKENS + 37}
    assert [line["batch"] for line in broker.metrics_lines() if line["event"] == "batch"] == list(range(8))


async def test_another_rollout_resumes_where_a_killed_one_was_acknowledged(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, broker={"lease_s": 1.5}) as broker:
        killed = ScriptedRollout(context, broker.work_endpoint, "killed", "s", action_tokens=400, chunk_delay_s=0.02)
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(learner.run())
            task = tasks.create_task(killed.run())
            await eventually(lambda: len(killed.chunks) >= 12)
            killed.be_killed()
            task.cancel()
            heir = ScriptedRollout(context, broker.work_endpoint, "heir", "s")
            tasks.create_task(heir.run())
        resumed = [lease for lease in heir.seen_leases if lease.num_tokens > PROMPT_TOKENS]
        assert {lease.trajectory_id for lease in resumed} == {lease.trajectory_id for lease in killed.seen_leases}
        assert all(lease.epoch > 1 and lease.state == {"at": lease.num_tokens} for lease in resumed)
        assert await broker.terminate() == 0
    assert broker.count("lease_expired") >= len(killed.seen_leases) == 4


async def test_a_new_learner_gets_the_same_batches_again(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path) as broker:
        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s")
        first = ScriptedLearner(
            context, broker.batch_endpoint, "first", checkpoint_every=2, stop_after=lambda index: index == 3
        )
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.run())
            await first.run()
            second = ScriptedLearner(context, broker.batch_endpoint, "second", name="learner-2", resume_at=2)
            await second.run()
        assert [batch.index for batch, _ in second.batches] == [2, 3]
        assert second.batches[0] == first.batches[2]
        # The file follows the commit, and an acknowledgement does not wait for it.
        await broker.terminate()
    again = [(line["batch"], line["again"]) for line in broker.metrics_lines() if line["event"] == "batch"]
    # The same batch gave the same weights, so it is trained once.
    assert again == [(0, False), (1, False), (2, False), (3, False)]


async def test_a_second_learner_waits_for_the_first_also_behind_a_new_broker_and_follows_when_that_one_is_silent(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    def learner(session: str) -> PeerClient:
        return a_client(
            context, BATCH, broker.batch_endpoint, role="learner", name="learner", session=session, clock=MonotonicClock()
        )

    async def beat(client: PeerClient) -> None:
        while True:
            await client.send(Heartbeat(policy_version=1, status="serving", leases=[]))
            await asyncio.sleep(0.2)

    published = Published(policy_version=1, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=9)
    async with broker_process(tmp_path) as broker, asyncio.timeout(RUN_TIMEOUT_S):
        first, second = learner("first"), learner("second")
        async with asyncio.TaskGroup() as tasks:
            fenced = tasks.create_task(ending(first.run()))
            beating = tasks.create_task(beat(first))
            await first.connected_welcome()
            waiting = tasks.create_task(second.run())
            await eventually(lambda: f"session {session_tag('first')} (learner) has this run" in second.refused)
            await first.send(published)
            await first.flushed()
            await broker.kill()
            await broker.start()
            await eventually(lambda: first.welcome is not None and first.welcome.policy_version == 1)
            await broker.logged("message_refused", times=2)
            assert not second.connected
            assert broker.count("session_replaced") == 0
            beating.cancel()
            welcome = await second.connected_welcome()
            assert welcome.policy_version == 1
            await first.send(Heartbeat(policy_version=1, status="serving", leases=[]))
            error = await fenced
            assert isinstance(error, ReplacedError)
            waiting.cancel()
    assert broker.count("session_replaced") == 1


async def test_a_second_rollout_of_one_name_gets_the_work_and_the_first_one_ends_with_the_reason(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    """Neither gets messages for the other: each waits for its own acknowledgements."""
    async with broker_process(tmp_path, broker={"lease_s": 60.0}) as broker, asyncio.timeout(RUN_TIMEOUT_S):
        first = ScriptedRollout(context, broker.work_endpoint, "r", "first", action_tokens=400, chunk_delay_s=0.02)
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(learner.run())
            fenced = tasks.create_task(ending(first.run()))
            await eventually(lambda: first.num_acknowledged >= 12)
            second = ScriptedRollout(context, broker.work_endpoint, "r", "second")
            tasks.create_task(second.run())
            error = await fenced
            assert isinstance(error, ReplacedError)
            assert f"session {session_tag('first')} of r was replaced by a newer one: two processes use this name" in str(
                error
            )
        assert learner.end is not None
        resumed = [lease for lease in second.seen_leases if lease.num_tokens > PROMPT_TOKENS]
        assert {lease.trajectory_id for lease in resumed} == {lease.trajectory_id for lease in first.seen_leases}
        assert await broker.terminate() == 0
    assert broker.count("session_replaced") == 1
    assert broker.count("lease_expired") == 0
    assert broker.count("lease_of_former_session_ended") == len(first.seen_leases) == 4


async def ending(client: Awaitable[None]) -> BaseException:
    """The error that ends a client."""
    try:
        await client
    except ExceptionGroup as group:
        (error,) = flatten(group)
        return error
    raise AssertionError("it ended without an error")


async def test_tasks_that_cannot_be_leased_are_dropped_with_the_reason_and_do_not_end_the_broker(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    settings = {
        "environment": {"name": "tests.support.odd_tasks:OddTasks"},
        "broker": {"failure_budget": 2, "max_attempts": 1},
    }
    async with broker_process(tmp_path, **settings) as broker:
        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s")
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
        assert learner.end is not None
        assert "2 groups in a row failed" in learner.end.reason
        assert "cannot be leased" in learner.end.reason
        assert await broker.terminate() == 0
    reasons = " ".join(event["reason"] for event in broker.events if event["event"] == "attempt_failed")
    assert "task has 2097163 bytes, 524288 allowed" in reasons
    assert "KeyError: 'row 1'" in reasons
    assert [line["event"] for line in broker.metrics_lines()] == ["dropped", "dropped"]


async def test_a_disk_that_refuses_holds_everything_back_and_loses_nothing(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, run={"num_batches": 6}, broker={"lease_s": 3.0}) as broker:
        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", chunk_delay_s=0.01)
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")

        async def refuse_for_a_while() -> None:
            await broker.logged("batch_trained", 2)
            before = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
            # No file may grow from here on: writes fail as they do on a full disk.
            resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
            await broker.logged("commit_failed", 3)
            status, reason = await broker.http("/readyz")
            assert status == 503
            assert "ledger.sqlite3: cannot be written" in reason
            assert (await broker.http("/healthz"))[0] == 200
            acknowledged = rollout.num_acknowledged
            await broker.logged("commit_failed", 5)
            assert rollout.num_acknowledged == acknowledged, "acknowledged without a commit"
            resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, before)

        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
            tasks.create_task(refuse_for_a_while())
        assert await broker.http("/readyz") == (200, "ready\n")
        assert [batch.index for batch, _ in learner.batches] == list(range(6))
        assert await broker.terminate() == 0
    assert broker.count("attempt_failed") == 0
    assert broker.count("lease_expired") == 0, "no heartbeat was read meanwhile, which is nobody's fault"
    assert len(rows_of_batches(broker, 6)) == 6
    assert [line["batch"] for line in broker.metrics_lines()] == list(range(6))


async def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with broker_process(tmp_path) as broker:
        second = BrokerProcess(tmp_path, {"run": {"directory": str(broker.run_directory)}})
        with pytest.raises(BrokerDidNotStart, match="stop the other broker that uses it"):
            await second.start()
        other = BrokerProcess(tmp_path, {"run": {"directory": str(tmp_path / "other")}})
        other.config.write_text(other.config.read_text().replace(other.work_endpoint, broker.work_endpoint))
        with pytest.raises(BrokerDidNotStart, match="cannot bind"):
            await other.start()
        assert await broker.terminate() == 0
    changed = BrokerProcess(tmp_path, {"batch": {"max_lag": 7}})
    with pytest.raises(BrokerDidNotStart, match="were changed"):
        await changed.start()
    resumed = BrokerProcess(tmp_path, {"sampling": {"temperature": 0.5}})
    await resumed.start()
    assert await resumed.terminate() == 0
