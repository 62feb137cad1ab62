"""The intake of one broker: stored and acknowledged chunks, compared with raw SQLite and raw ZeroMQ in the same rounds.

    python -m benchmarks.broker_intake --chunk-tokens 16 64 512 --json broker_intake.json

Real producers (connections with the rollouts' window, 64 leases each) send to a real broker process, with and without
CURVE, and to one with each chunk in a message of its own. Each round runs, one after the other: the three brokers; group
commits of the same rows to the same tables, with as many chunks each as the broker's; the same frames from as many DEALERs
to a ROUTER that does nothing, with and without
CURVE. A ratio is taken within its round, per CPU second of the receiving process (all its threads), so that producers and
other work on the machine matter little. Figures are medians over the rounds, with quartiles.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import zmq.asyncio

from benchmarks.broker_intake.child import Child, cpu_s
from benchmarks.broker_intake.load import CHUNKS_PER_TRAJECTORY, LEASES, TOKEN_BYTES
from gspo_protocol.channels import BATCH
from gspo_protocol.limits import MAX_VOCABULARY
from gspo_protocol.messages import Published, Resume
from gspo_services.shared.net import PLAINTEXT, PeerClient, Security, write_key_pair
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.settings import SecuritySection
from tests.support.broker.peers import running
from tests.support.broker.process import BrokerProcess, broker_process

GROUP_SIZE, GROUPS_PER_BATCH, MAX_LAG = 8, 64, 127
GROUPS_ALLOWED = GROUPS_PER_BATCH * (MAX_LAG + 1)
LATENCY_CHUNKS: Final = 200
SQLITE, ROUTER, ROUTER_CURVE, BROKER, BROKER_CURVE, BROKER_ALONE = KINDS = (
    "SQLite alone",
    "ROUTER alone",
    "ROUTER alone, CURVE",
    "broker",
    "broker, CURVE",
    "broker, one chunk a message",
)


@dataclass(kw_only=True)
class Rate:
    """One kind in one round."""

    chunks: int
    seconds: float
    cpu_s: float
    latencies_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    """Latencies with one chunk in flight per producer."""
    commits: float = 0

    @property
    def per_s(self) -> float:
        return self.chunks / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.chunks / self.cpu_s


Round = dict[str, Rate]


class Intake:
    """A broker with its producers; ``take`` makes each send chunks and waits until they are acknowledged."""

    def __init__(self, broker: BrokerProcess, producers: list[Child]) -> None:
        self._broker = broker
        self._producers = producers

    async def take(self, num_chunks: int, under_way: int = 0) -> Rate:
        """Take ``num_chunks`` in all. Seconds are those of the slowest producer."""
        share = num_chunks // len(self._producers)
        for producer in self._producers:
            producer.tell(prepare=share)
        for producer in self._producers:
            await asyncio.to_thread(producer.answer)
        commits, cpu = await self._commits(), cpu_s(self._broker.pid)
        for producer in self._producers:
            producer.tell(chunks=share, under_way=under_way)
        answers = [await asyncio.to_thread(producer.answer) for producer in self._producers]
        return Rate(
            chunks=share * len(self._producers),
            seconds=max(answer["seconds"] for answer in answers),
            cpu_s=cpu_s(self._broker.pid) - cpu,
            latencies_s=[latency for answer in answers for latency in answer["latencies_s"]],
            commits=await self._commits() - commits,
        )

    async def end(self) -> None:
        """Stop the broker in order."""
        await self._broker.terminate()

    async def _commits(self) -> float:
        _, text = await self._broker.http("/metrics")
        return next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("gspo_broker_commit_seconds_count")
        )


@contextlib.asynccontextmanager
async def intake(
    directory: Path,
    chunk_tokens: int,
    num_producers: int,
    keys: Path | None,
    *,
    module: str = "gspo_services.broker",
    kind: str = "gathered",
    broker_settings: dict[str, Any] | None = None,
) -> Any:
    """Open a broker (``python -m MODULE``) that has a published version, and producers that hold leases from it."""
    await asyncio.to_thread(directory.mkdir)
    settings: dict[str, dict[str, Any]] = {
        "run": {"num_batches": 1000},
        "batch": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH, "mini_batches": 1, "max_lag": MAX_LAG},
        "sampling": {"max_turn_tokens": 1, "max_tokens": max(CHUNKS_PER_TRAJECTORY * chunk_tokens, 256)},
        "security": {} if keys is None else {"keys": str(keys)},
        "broker": broker_settings or {},
    }
    security = PLAINTEXT if keys is None else Security.load(SecuritySection(keys=str(keys)), "learner")
    context = zmq.asyncio.Context()
    async with broker_process(directory, module=module, **settings) as broker, contextlib.AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        learner = PeerClient(
            context,
            BATCH,
            broker.batch_endpoint,
            role="learner",
            peer="learner",
            session="s",
            clock=MonotonicClock(),
            security=security,
        )
        stack.callback(learner.close)
        await stack.enter_async_context(running(learner))
        await learner.connected_welcome()
        await learner.send(Resume(next_batch=0))
        await learner.send(
            Published(
                policy_version=1,
                endpoint="tcp://127.0.0.1:1",
                digest="d",
                num_bytes=1,
                trained_batches=0,
                vocabulary=MAX_VOCABULARY,
            )
        )
        await learner.flushed()
        producers = [
            stack.enter_context(
                Child(
                    "benchmarks.broker_intake.producer",
                    broker.work_endpoint,
                    f"rollout-{number}",
                    str(chunk_tokens),
                    kind,
                    *([] if keys is None else [str(keys)]),
                )
            )
            for number in range(num_producers)
        ]
        yield Intake(broker, producers)


class RawSocket:
    """Open DEALERs and a ROUTER, each in its own process."""

    def __init__(self, router: Child, dealers: list[Child]) -> None:
        self._router = router
        self._dealers = dealers

    async def take(self, num_chunks: int) -> Rate:
        share = num_chunks // len(self._dealers)
        self._router.tell(messages=share * len(self._dealers))
        for dealer in self._dealers:
            dealer.tell(messages=share)
        answer = await asyncio.to_thread(self._router.answer)
        for dealer in self._dealers:
            await asyncio.to_thread(dealer.answer)
        return Rate(chunks=share * len(self._dealers) - 1, **answer)


@contextlib.contextmanager
def raw_socket(chunk_tokens: int, num_producers: int, *, curve: bool) -> Iterator[RawSocket]:
    public, secret = (key.decode() for key in zmq.curve_keypair()) if curve else ("-", "-")
    module = "benchmarks.broker_intake.raw"
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(Child(module, "router", secret))
        endpoint = router.ask(endpoint=True)["endpoint"]
        dealers = [
            stack.enter_context(Child(module, "dealer", endpoint, str(chunk_tokens), public)) for _ in range(num_producers)
        ]
        yield RawSocket(router, dealers)


async def measure(directory: Path, chunk_tokens: int, num_chunks: int, num_rounds: int, num_producers: int) -> list[Round]:
    """Measure all kinds in turn, ``num_rounds`` times after one round to warm up, which does not count."""
    keys = directory / "keys"
    for role in ("broker", "learner", "rollout", "operator"):
        write_key_pair(keys, role, overwrite=False)
    rounds: list[Round] = []
    async with contextlib.AsyncExitStack() as stack:
        plain = await stack.enter_async_context(intake(directory / "plain", chunk_tokens, num_producers, None))
        curve = await stack.enter_async_context(intake(directory / "curve", chunk_tokens, num_producers, keys))
        alone = await stack.enter_async_context(intake(directory / "alone", chunk_tokens, num_producers, None, kind="alone"))
        sqlite = stack.enter_context(
            Child("benchmarks.broker_intake.raw", "sqlite", str(directory / "raw.sqlite3"), str(chunk_tokens))
        )
        socket = stack.enter_context(raw_socket(chunk_tokens, num_producers, curve=False))
        socket_curve = stack.enter_context(raw_socket(chunk_tokens, num_producers, curve=True))
        for _ in range(num_rounds + 1):
            row: Round = {}
            for kind, broker in ((BROKER, plain), (BROKER_CURVE, curve), (BROKER_ALONE, alone)):
                row[kind] = await broker.take(num_chunks)
                row[kind].alone_s = (await broker.take(LATENCY_CHUNKS, under_way=1)).latencies_s
            per_commit = max(1, round(row[BROKER].chunks / row[BROKER].commits))
            answer = await asyncio.to_thread(
                sqlite.ask, chunks=num_chunks, per_commit=per_commit, leases=LEASES * num_producers
            )
            row[SQLITE] = Rate(chunks=num_chunks, commits=-(-num_chunks // per_commit), **answer)
            row[ROUTER] = await socket.take(num_chunks)
            row[ROUTER_CURVE] = await socket_curve.take(num_chunks)
            rounds.append(row)
    return rounds[1:]


# --- report ---------------------------------------------------------------------------------------------------------------


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(rounds: list[Round], kind: str) -> list[float]:
    """Return chunks per CPU second over those of the slower half in the same round; with CURVE, the ROUTER has CURVE too."""
    router = ROUTER_CURVE if kind == BROKER_CURVE else ROUTER
    return [row[kind].per_cpu_s / min(row[SQLITE].per_cpu_s, row[router].per_cpu_s) for row in rounds]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(chunk_tokens: int, rounds: list[Round]) -> list[str]:
    """Return the Markdown rows of one chunk size."""
    lines = []
    for kind in KINDS:
        rates = [row[kind] for row in rounds]
        per_s = statistics.median(rate.per_s for rate in rates)
        low, middle, high = quartiles([rate.per_cpu_s for rate in rates])
        cells = [
            f"{per_s:,.0f}",
            f"{per_s * chunk_tokens * TOKEN_BYTES / 1e6:.1f}",
            f"{middle:,.0f} ({low:,.0f} to {high:,.0f})",
        ]
        commits = [rate.chunks / rate.commits for rate in rates if rate.commits]
        cells.append(f"{statistics.median(commits):.0f}" if commits else "")
        if rates[0].latencies_s:
            low, middle, high = quartiles(ratios(rounds, kind))
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            for latencies in ([s for rate in rates for s in rate.alone_s], [s for rate in rates for s in rate.latencies_s]):
                cells.append(f"{1000 * percentile(latencies, 0.5):.1f} / {1000 * percentile(latencies, 0.99):.1f}")
        else:
            cells += ["", "", ""]
        lines.append(f"| {chunk_tokens} | {kind} | " + " | ".join(cells) + " |")
    return lines


HEAD = [
    "| tokens | what | chunks/s | MB/s | chunks per CPU second (quartiles) | chunks per commit "
    "| per core, of the slower half (quartiles) "
    "| ms to the acknowledgement, one under way: p50 / p99 | as many as the window allows: p50 / p99 |",
    "|---|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[64, 16, 512])
    parser.add_argument("--chunks", type=int, default=6000, help="chunks in each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--producers", type=int, default=4, help="producer processes")
    parser.add_argument("--directory", type=Path, help="where ledgers are written (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    arguments = parser.parse_args()
    wanted = (arguments.rounds + 1) * (
        arguments.chunks + LATENCY_CHUNKS
    ) + LEASES * arguments.producers * CHUNKS_PER_TRAJECTORY
    if wanted > GROUPS_ALLOWED * GROUP_SIZE * CHUNKS_PER_TRAJECTORY:
        parser.error(f"{wanted} chunks do not fit the run: use fewer --rounds or --chunks")
    configure_logging("benchmark")
    results: dict[int, list[Round]] = {}
    print("\n".join(HEAD), flush=True)
    for chunk_tokens in arguments.chunk_tokens:
        with tempfile.TemporaryDirectory(prefix="broker-intake-", dir=arguments.directory) as directory:
            results[chunk_tokens] = asyncio.run(
                measure(Path(directory), chunk_tokens, arguments.chunks, arguments.rounds, arguments.producers)
            )
        print("\n".join(table(chunk_tokens, results[chunk_tokens])), flush=True)
    if arguments.json:
        made = {
            "made": datetime.now(tz=UTC).isoformat(timespec="seconds"),
            "machine": platform.platform(),
            "cores": psutil.cpu_count(),
            "rounds": {
                size: [{kind: asdict(rate) for kind, rate in row.items()} for row in rounds]
                for size, rounds in results.items()
            },
        }
        arguments.json.write_text(json.dumps(made))


if __name__ == "__main__":
    main()
