"""A learner that is far too slow for its rollouts: where work waits, memory, queue lengths, and losses.

    python -m benchmarks.slow_learner --batches 10 --train-s 60 --plot docs/evidence/images/slow_learner.png

A real broker process serves real rollout connections, one process each. They have no engine: they generate as fast as the
broker accepts. The learner takes one batch, reports it as trained after ``train-s``, and publishes. Memory and queues are
sampled meanwhile, and the ledger is audited at the end. Nothing may be dropped: admission has to hold generation back.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from gspo_protocol.channels import BATCH
from gspo_protocol.limits import MAX_VOCABULARY
from gspo_protocol.messages import Batch, BatchRequest, Checkpointed, Published, Resume, Trained
from gspo_services.runs.audit import audit_run
from gspo_services.shared.net import PeerClient
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.logs import configure_logging
from tests.support.broker.peers import PROMPT_TOKENS, ScriptedRollout, running
from tests.support.broker.process import BrokerProcess, broker_process

GROUP_SIZE, GROUPS_PER_BATCH, MAX_LAG = 8, 32, 2
ACTION_TOKENS, CAPACITY = 125, 64
SAMPLE_S, REPORT_S, REQUEST_S = 2.0, 0.5, 1.0
GAUGES: Final = {
    "queue_messages": "gspo_broker_queue_messages",
    "queue_bytes": "gspo_broker_queue_bytes",
    "groups": "gspo_broker_admission_groups",
    "groups_allowed": "gspo_broker_admission_limit_groups",
    "chunks": "gspo_broker_chunks_total",
    "trained": "gspo_broker_batches_trained",
}
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at all processes. Bytes are resident sets."""

    time_s: float
    broker_bytes: int
    rollout_bytes: int
    """That of the largest rollout."""
    unacknowledged: int
    """Messages that all rollouts keep, together."""
    episodes: int
    """Those under way, in all rollouts together."""
    queue_messages: float
    queue_bytes: float
    groups: float
    groups_allowed: float
    chunks: float
    trained: float
    dropped: float


@dataclass(kw_only=True)
class Outcome:
    """The whole run."""

    rollouts: int
    train_s: float
    samples: list[Sample] = field(default_factory=list)
    batches: int = 0
    max_lag: int = 0
    audit_clean: bool = False
    audit_problems: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return the rows of the table; growth is from the end of the first batch to the last sample."""
        warm = [sample for sample in self.samples if sample.trained >= 1] or self.samples
        last = self.samples[-1]
        return {
            "seconds": last.time_s,
            "chunks": last.chunks,
            "broker_mib_after_first_batch": warm[0].broker_bytes / MIB,
            "broker_mib_last": last.broker_bytes / MIB,
            "broker_mib_most": max(sample.broker_bytes for sample in self.samples) / MIB,
            "rollout_mib_after_first_batch": warm[0].rollout_bytes / MIB,
            "rollout_mib_last": last.rollout_bytes / MIB,
            "rollout_mib_most": max(sample.rollout_bytes for sample in self.samples) / MIB,
            "queue_messages_most": max(sample.queue_messages for sample in self.samples),
            "queue_kib_most": max(sample.queue_bytes for sample in self.samples) / 1024,
            "unacknowledged_most": max(sample.unacknowledged for sample in self.samples),
            "groups_most": max(sample.groups for sample in self.samples),
            "groups_allowed": last.groups_allowed,
            "dropped": last.dropped,
        }


@dataclass
class RolloutProcess:
    """A rollout in its own process, and its last report."""

    process: asyncio.subprocess.Process
    report: dict[str, int] = field(default_factory=lambda: {"unacknowledged": 0, "episodes": 0})

    @classmethod
    async def start(cls, endpoint: str, name: str) -> "RolloutProcess":
        command = [sys.executable, "-m", "benchmarks.slow_learner", "--rollout", endpoint, name]
        return cls(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))

    async def follow(self) -> None:
        """Read its reports until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.report = json.loads(line)

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()


async def rollout(endpoint: str, name: str) -> None:
    """Generate until SIGTERM, with a report every REPORT_S."""
    context = zmq.asyncio.Context()
    double = ScriptedRollout(
        context, endpoint, name, session="s", capacity=CAPACITY, action_tokens=ACTION_TOKENS, chunk_delay_s=0.0
    )
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)

    async def report() -> None:
        while True:
            # The double's memory for tests is not a rollout's memory.
            double.seen_leases.clear()
            line = {"unacknowledged": double.peer.num_unacknowledged, "episodes": len(double.episodes_under_way)}
            print(json.dumps(line), flush=True)
            await asyncio.sleep(REPORT_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(report(), name="report")
            await double.run()
            reporting.cancel()
    finally:
        double.peer.close()
        context.destroy(linger=0)


@dataclass
class SlowLearner:
    """Take a batch, train nothing for ``train_s``, publish, report; ``num_batches`` times."""

    peer: PeerClient
    num_batches: int
    train_s: float
    max_lag: int = 0
    """Largest lag of any action token."""

    async def run(self) -> None:
        async with running(self.peer):
            await self.peer.connected_welcome()
            await self.peer.send(Resume(next_batch=0))
            await self._publish(0)
            for index in range(self.num_batches):
                batch = await self._batch(index)
                self.max_lag = max(self.max_lag, batch.policy_version - min(item.oldest_version for item in batch.items))
                await asyncio.sleep(self.train_s)
                version = await self._publish(index + 1)
                await self.peer.send(Trained(index=index, policy_version=version, metrics={}))
                await self.peer.send(Checkpointed(next_batch=index + 1, policy_version=version))
            await self.peer.flushed()

    async def _publish(self, trained_batches: int) -> int:
        version = trained_batches + 1
        message = Published(
            policy_version=version,
            endpoint="tcp://127.0.0.1:1",
            digest="d",
            num_bytes=1,
            trained_batches=trained_batches,
            vocabulary=MAX_VOCABULARY,
        )
        await self.peer.send(message)
        return version

    async def _batch(self, index: int) -> Batch:
        while True:
            await self.peer.send(BatchRequest(index=index, policy_version=index + 1))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REQUEST_S):
                    while True:
                        delivered = await self.peer.inbox.get()
                        message = delivered.message
                        if isinstance(message, Batch) and message.index == index:
                            return message


async def sample(broker: BrokerProcess, rollouts: list[RolloutProcess], time_s: float) -> Sample:
    """Return what /metrics, the rollouts and the kernel report now."""
    _, text = await broker.http("/metrics")
    values: dict[str, float] = {}
    dropped = 0.0
    for family in text_string_to_metric_families(text):
        for line in family.samples:
            if not line.labels:
                values[line.name] = line.value
            elif line.name == "gspo_broker_dropped_groups_total":
                dropped += line.value
    return Sample(
        time_s=time_s,
        broker_bytes=psutil.Process(broker.pid).memory_info().rss,
        rollout_bytes=max(psutil.Process(each.process.pid).memory_info().rss for each in rollouts),
        unacknowledged=sum(each.report["unacknowledged"] for each in rollouts),
        episodes=sum(each.report["episodes"] for each in rollouts),
        dropped=dropped,
        **{name: values[metric] for name, metric in GAUGES.items()},
    )


async def measure(directory: Path, num_batches: int, train_s: float, num_rollouts: int) -> Outcome:
    """Run it all; the ledger is left in ``directory``/run."""
    outcome = Outcome(rollouts=num_rollouts, train_s=train_s)
    clock = MonotonicClock()
    context = zmq.asyncio.Context()
    settings: dict[str, dict[str, Any]] = {
        "run": {"num_batches": num_batches + MAX_LAG + 1},
        "batch": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH, "mini_batches": 1, "max_lag": MAX_LAG},
    }
    async with broker_process(directory, **settings) as broker, contextlib.AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        rollouts = [await RolloutProcess.start(broker.work_endpoint, f"rollout-{n}") for n in range(num_rollouts)]
        for each in rollouts:
            stack.push_async_callback(each.stop)
        endpoint = broker.batch_endpoint
        peer = PeerClient(context, BATCH, endpoint, role="learner", peer="learner", session="s", clock=clock)
        stack.callback(peer.close)
        learner = SlowLearner(peer, num_batches, train_s)
        begin = clock.now()

        async def look() -> None:
            while True:
                outcome.samples.append(await sample(broker, rollouts, clock.now() - begin))
                await asyncio.sleep(SAMPLE_S)

        async with asyncio.TaskGroup() as tasks:
            followers = [tasks.create_task(each.follow(), name="follow") for each in rollouts]
            looking = tasks.create_task(look(), name="look")
            await learner.run()
            looking.cancel()
            outcome.samples.append(await sample(broker, rollouts, clock.now() - begin))
            for each in rollouts:
                await each.stop()
            await asyncio.gather(*followers)
        await broker.terminate()
    outcome.batches, outcome.max_lag = num_batches, learner.max_lag
    audit = audit_run(broker.run_directory)
    outcome.audit_clean = audit.clean
    outcome.audit_problems = list(audit.problems[:8])
    return outcome


def plot(outcome: Outcome, path: Path) -> None:
    """Plot memory above and waiting work below, over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [each.time_s / 60 for each in outcome.samples]
    figure, (memory, waiting) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    memory.plot(minutes, [each.broker_bytes / MIB for each in outcome.samples], label="broker")
    memory.plot(minutes, [each.rollout_bytes / MIB for each in outcome.samples], label="largest rollout")
    memory.set(ylabel="resident memory, MiB", ylim=(0, None), title=f"One batch every {outcome.train_s:.0f} s")
    waiting.plot(minutes, [each.groups for each in outcome.samples], label="groups admitted and not yet in a batch")
    waiting.plot(minutes, [each.groups_allowed for each in outcome.samples], "--", color="grey", label="allowed")
    waiting.plot(minutes, [each.queue_messages for each in outcome.samples], label="messages in the broker's queue")
    waiting.plot(minutes, [each.unacknowledged for each in outcome.samples], label="unacknowledged at the rollouts")
    waiting.set(xlabel="minutes", ylabel="number", ylim=(0, None))
    for axes in (memory, waiting):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--train-s", type=float, default=60.0, help="seconds that the learner spends on a batch")
    parser.add_argument("--rollouts", type=int, default=2, help="rollout processes")
    parser.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    parser.add_argument("--json", type=Path, help="write all samples here")
    parser.add_argument("--rollout", nargs=2, metavar=("ENDPOINT", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    configure_logging("benchmark")
    if arguments.rollout:
        with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
            asyncio.run(rollout(*arguments.rollout))
        return
    with tempfile.TemporaryDirectory(prefix="slow-learner-") as directory:
        outcome = asyncio.run(measure(Path(directory), arguments.batches, arguments.train_s, arguments.rollouts))
    if arguments.json:
        made = {"machine": platform.platform(), "made": datetime.now(tz=UTC).isoformat(timespec="seconds")}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(made | asdict(outcome) | {"summary": outcome.summary()}, indent=1))
    if arguments.plot:
        plot(outcome, arguments.plot)
    tokens = PROMPT_TOKENS + ACTION_TOKENS
    trajectories = f"{GROUPS_PER_BATCH * GROUP_SIZE} trajectories of {tokens} tokens"
    print(f"{outcome.batches} batches of {trajectories}, largest lag {outcome.max_lag}")
    for name, value in outcome.summary().items():
        print(f"| {name} | {value:,.1f} |")
    print(f"audit clean: {outcome.audit_clean} {outcome.audit_problems}")
    if not outcome.audit_clean or outcome.samples[-1].dropped:
        sys.exit(1)


if __name__ == "__main__":
    main()
