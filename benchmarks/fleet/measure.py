"""One fleet from its first Hello to the audit: what the broker took for it."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import zmq.asyncio

from benchmarks.broker_intake.child import Child
from benchmarks.fleet.broker import MeasuredProcess
from benchmarks.fleet.learner import FakeLearner
from benchmarks.fleet.load import Load, run_settings
from gspo_services.runs.audit import audit_run
from gspo_services.shared.runtime.clock import MonotonicClock

SAMPLE_S: Final = 0.5
JOIN_AT_ONCE: Final = 50
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one fleet is measured. ``seconds``: of each of the two phases, the steady one and that with joins and losses."""

    rollouts: int
    processes: int
    load: Load
    seconds: float
    lease_s: float
    recover_s: float
    churn: float
    """The share of the fleet that is killed in the second phase; half as many leave in order, and as many join."""


class FakeFleet:
    """The processes of the fleet."""

    def __init__(self, members: list[Child]) -> None:
        self._members = members
        self._number = 0

    async def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Ask all processes at once."""
        for member in self._members:
            member.tell(**request)
        return [await asyncio.to_thread(member.answer) for member in self._members]

    async def join(self, number: int) -> None:
        """Add rollouts, spread over the processes, and wait until all are welcome."""
        while number > 0:
            now = min(number, JOIN_AT_ONCE)
            names: list[list[str]] = [[] for _ in self._members]
            for _ in range(now):
                names[self._number % len(names)].append(f"rollout-{self._number}")
                self._number += 1
            await self._tell_each("join", names)
            number -= now

    async def end(self, how: str, number: int) -> None:
        """``lose`` or ``leave`` so many of them."""
        parts = [number // len(self._members) + (place < number % len(self._members)) for place in range(len(self._members))]
        await self._tell_each(how, parts)

    async def _tell_each(self, what: str, values: list[Any]) -> None:
        asked = [(member, value) for member, value in zip(self._members, values, strict=True) if value]
        for member, value in asked:
            member.tell(**{what: value})
        for member, _ in asked:
            await asyncio.to_thread(member.answer)


def percentile(values: list[float], share: float) -> float:
    """Of values in any order; 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def observed(
    fleet: FakeFleet, broker: MeasuredProcess, seconds: float, during: Callable[[], Awaitable[None]] | None = None
) -> dict[str, Any]:
    """What happens in the next ``seconds``, in which ``during`` is carried out."""
    clock = MonotonicClock()
    await fleet.ask(reset=True)
    began, cpu = clock.now(), broker.cpu_s()
    most = broker.takes()
    async with asyncio.TaskGroup() as tasks:
        if during is not None:
            tasks.create_task(_awaited(during), name="during")
        while clock.now() < began + seconds:
            await asyncio.sleep(min(SAMPLE_S, max(0.0, began + seconds - clock.now())))
            most = {name: max(most[name], value) for name, value in broker.takes().items()}
    spent, passed = broker.cpu_s() - cpu, clock.now() - began
    seen = await fleet.ask(figures=True)
    chunks = sum(each["chunks"] for each in seen)
    acks, leases = ([value for each in seen for value in each[name]] for name in ("ack_s", "lease_s"))
    return {
        "seconds": passed,
        "chunks_per_s": chunks / passed,
        "leases_per_s": sum(each["leases"] for each in seen) / passed,
        "no_leases_per_s": sum(each["no_leases"] for each in seen) / passed,
        "leases_ended": sum(each["ended"] for each in seen),
        "broker_cores": spent / passed,
        "cpu_us_per_chunk": 1e6 * spent / max(1, chunks),
        "ack_p50_ms": 1e3 * percentile(acks, 0.5),
        "ack_p99_ms": 1e3 * percentile(acks, 0.99),
        "lease_p50_ms": 1e3 * percentile(leases, 0.5),
        "lease_p99_ms": 1e3 * percentile(leases, 0.99),
        **most,
        "fleet_loop_late_ms": 1e3 * max(each["loop_late_s"] for each in seen),
        "fleet_rss_mib": sum(each["rss_bytes"] for each in seen) / 2**20,
        "fleet_files": max(each["files"] for each in seen),
        "load_average": psutil.getloadavg()[0],
    }


async def _awaited(action: Callable[[], Awaitable[None]]) -> None:
    await action()


async def churned(fleet: FakeFleet, broker: MeasuredProcess, plan: Plan) -> dict[str, Any]:
    """The same while rollouts are killed, leave in order, and as many others join."""
    lost = max(1, round(plan.churn * plan.rollouts))
    left = lost // 2

    async def change() -> None:
        await asyncio.sleep(plan.seconds / 4)
        await fleet.end("lose", lost)
        await fleet.end("leave", left)
        await fleet.join(lost + left)

    return {"lost": lost, "left": left, "joined": lost + left, **await observed(fleet, broker, plan.seconds, change)}


async def killed(fleet: FakeFleet, broker: MeasuredProcess, plan: Plan) -> dict[str, Any]:
    """kill -9 of the broker, and the time until every rollout had something new acknowledged by it."""
    clock = MonotonicClock()
    await fleet.ask(watch=True)
    at = clock.now()
    await broker.kill()
    serves = clock.now()
    cpu = broker.cpu_s()
    answers = await fleet.ask(recover=plan.recover_s)
    since = [value - at for each in answers for value in each["working_since"]]
    return {
        "broker_starts_s": serves - at,
        "working": len(since),
        "recovered_p50_s": percentile(since, 0.5),
        "recovered_all_s": max(since, default=0.0),
        "recovery_cpu_s": broker.cpu_s() - cpu,
    }


def missing(ledger: Path, acknowledged: dict[int, tuple[int, int]]) -> list[str]:
    """What was acknowledged and is not in the ledger; empty: nothing.

    ``acknowledged``: epoch and tokens by trajectory. Looked at are those that nobody else had afterwards: a rollout may
    not have heard that its lease had ended, and what comes after that is acknowledged and not taken.
    """
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        # The row of a lease may be behind its chunks.
        of_chunks = "(SELECT total(num_tokens) FROM chunks c WHERE c.trajectory_id = t.trajectory_id)"
        query = f"SELECT trajectory_id, epoch, max(num_tokens, {of_chunks}), status FROM trajectories t"
        stored = {key: row for key, *row in connection.execute(query)}
    found = []
    for key, (epoch, tokens) in sorted(acknowledged.items()):
        now, have, status = stored.get(key, (epoch, 0, "missing"))
        if now <= epoch and have < tokens and status != "free":
            found.append(f"trajectory {key}: {tokens} tokens were acknowledged, {have} are in the ledger ({status})")
    return found


async def proven(fleet: FakeFleet, broker: MeasuredProcess, directory: Path) -> dict[str, Any]:
    """Stop the broker, and compare what was acknowledged with what it has."""
    acknowledged: dict[int, tuple[int, int]] = {}
    for answer in await fleet.ask(acknowledged=str(directory)):
        text = await asyncio.to_thread(Path(answer["path"]).read_text)
        for key, (epoch, tokens) in json.loads(text).items():
            acknowledged[int(key)] = max((epoch, tokens), acknowledged.get(int(key), (0, 0)))
    await broker.terminate()
    audit = await asyncio.to_thread(audit_run, broker.run_directory)
    ledger = broker.ledger
    return {
        "ledger_mib": sum(file.stat().st_size for file in ledger.parent.glob(f"{ledger.name}*")) / 2**20,
        "trajectories_checked": len(acknowledged),
        "missing": missing(ledger, acknowledged),
        "audit_problems": [str(problem) for problem in audit.problems],
    }


@contextlib.asynccontextmanager
async def opened(directory: Path, plan: Plan, module: str) -> AsyncIterator[tuple[MeasuredProcess, FakeFleet, FakeLearner]]:
    """A broker with a learner that takes batches, and the processes of a fleet without rollouts yet."""
    context = zmq.asyncio.Context()
    settings = run_settings(plan.rollouts, plan.load.chunk_tokens, plan.lease_s)
    async with MeasuredProcess(directory, settings, module).running() as broker, contextlib.AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        learner = FakeLearner(context, broker.batch_endpoint, MonotonicClock())
        arguments = (broker.work_endpoint, str(plan.load.pace), str(plan.load.chunk_tokens))
        members = [
            stack.enter_context(Child("benchmarks.fleet.member", *arguments))
            for _ in range(min(plan.processes, plan.rollouts))
        ]
        learning = asyncio.get_running_loop().create_task(learner.run(), name="learner")
        try:
            yield broker, FakeFleet(members), learner
        finally:
            learning.cancel()
            await asyncio.wait([learning])


async def measured(directory: Path, plan: Plan, say: Say, module: str = "gspo_services.broker") -> dict[str, Any]:
    """All figures of one fleet, by phase. ``module`` runs the broker."""
    clock = MonotonicClock()
    async with opened(directory, plan, module) as (broker, fleet, learner):
        began = clock.now()
        await fleet.join(plan.rollouts)
        joined_s = clock.now() - began
        say(f"{plan.rollouts} rollouts joined in {joined_s:.1f} s; {plan.seconds:g} s to warm up")
        await asyncio.sleep(plan.seconds)
        say(f"steady for {plan.seconds:g} s")
        steady = await observed(fleet, broker, plan.seconds)
        say(f"{steady['chunks_per_s']:.0f} chunks/s; joins and losses for {plan.seconds:g} s")
        changing = await churned(fleet, broker, plan)
        say(f"{changing['lost']} killed and {changing['joined']} joined; kill -9 of the broker")
        recovery = await killed(fleet, broker, plan)
        say(f"{recovery['working']} of {plan.rollouts} work again after {recovery['recovered_all_s']:.1f} s; audit")
        batches = learner.num_batches
        proof = await proven(fleet, broker, directory)
    return {
        "rollouts": plan.rollouts,
        "joined_s": joined_s,
        "batches": batches,
        "steady": steady,
        "changing": changing,
        "recovery": recovery,
        "proof": proof,
    }
