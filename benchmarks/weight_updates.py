"""What a weight update costs: bytes of deltas, rates of the codec, the learner's egress to a fleet, the pause of generation.

    python -m benchmarks.weight_updates                                   all parts: some 6 minutes on an idle machine
    python -m benchmarks.weight_updates --parts sizes rates --json out.json

sizes   a small Qwen3-MoE in bfloat16 with float32 master weights under AdamW, after WARM steps: bytes of each step's delta
rates   encoding and applying a delta, against memcpy, BLAKE2b and zstd of the same bytes, on one core
fleet   a snapshot and a delta to 1..32 receivers over loopback, with and without neighbours: bytes that the learner sent
pause   a real SGLang server: how long generation stands still, against SGLang's own time to load the same file
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.serving import serving_weights
from protocol.channels import WEIGHTS
from protocol.codec import encode
from protocol.digests import tensor_digest
from services.learner.delta import encode_delta
from services.learner.metrics import LearnerMetrics
from services.learner.snapshot import Delta, Snapshot, SnapshotStore, build_snapshot
from services.learner.tiny import build_tokenizer
from services.learner.weight_server import WeightServer
from services.rollout.engine import Engine, PauseMode
from services.rollout.held import HeldWeights
from services.rollout.metrics import RolloutMetrics
from services.rollout.neighbours import Neighbours
from services.rollout.server import EngineServer, ServerOptions
from services.rollout.sync import WeightSync
from services.rollout.weights import fetch_newest
from services.runtime.channel import RouterChannel
from services.runtime.clock import MonotonicClock
from services.runtime.compression import compress
from services.runtime.gate import Gate
from services.runtime.peer import PeerClient
from services.runtime.security import PLAINTEXT

WARM, MEASURED = 20, 10
VOCABULARY = 264
RATE_BYTES = 128 * 1024 * 1024
FLEET_BYTES = 16 * 1024 * 1024
FLEETS = (1, 2, 4, 8, 16, 32)
PAUSES = 5
ANY_PORT = "tcp://127.0.0.1:*"
T = TypeVar("T")


def a_model(*, hidden: int = 128, layers: int = 4, experts: int = 8) -> Qwen3MoeForCausalLM:
    """Random, 2.2 million parameters by default."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
    )
    return Qwen3MoeForCausalLM(config).float()


def training(model: Qwen3MoeForCausalLM, learning_rate: float) -> Iterator[int]:
    """One optimizer step for each item: AdamW on a policy gradient's kind of loss, log-probs weighted by random advantages.

    The forward pass is in the master weights' float32: what is published is rounded to bfloat16, as DeepSpeed does.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    step = 0
    while True:
        ids = torch.randint(0, VOCABULARY, (16, 48), generator=generator)
        advantages = torch.randn(16, 1, generator=generator)
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        yield step


def published(model: Qwen3MoeForCausalLM, version: int) -> Snapshot:
    return build_snapshot(version, serving_weights(model, gathered=nullcontext, dtype=torch.bfloat16))


def random_version(num_bytes: int, version: int, changed: float) -> Snapshot:
    """bfloat16 weights in tensors of 2 MiB; each version another one of ``changed`` of their elements by one step."""
    rows = num_bytes // 2 // 1024
    weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    bits = weight.view(torch.int16).reshape(-1)
    for each in range(2, version + 1):
        generator = torch.Generator().manual_seed(each)
        chosen = torch.randint(0, len(bits), (int(changed * len(bits)),), generator=generator)
        bits[chosen] += 1
    return build_snapshot(version, ((f"w{at}", weight[at : at + 1024]) for at in range(0, rows, 1024)))


def must(delta: Delta | None) -> Delta:
    if delta is None:
        raise RuntimeError("the delta would not pay")
    return delta


# --- sizes --------------------------------------------------------------------------------------------------------------


def sizes(_: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for learning_rate in (1e-6, 1e-5, 1e-4):
        model = a_model()
        before = published(model, 1)
        changed, shares, absolute = [], [], []
        for step in training(model, learning_rate):
            after = published(model, step + 1)
            if step > WARM:
                delta = must(encode_delta(before, after))
                number = sum(bucket.num_changed for bucket in delta.manifest.buckets)
                wire = len(delta.data) + len(encode(delta.manifest)[0])
                changed.append(200 * number / after.manifest.num_bytes)
                shares.append(100 * wire / after.manifest.num_bytes)
                absolute.append(100 * sum(bucket.num_absolute for bucket in delta.manifest.buckets) / number)
            before = after
            if step == WARM + MEASURED:
                break
        rows.append(
            {
                "learning rate": f"{learning_rate:.0e}",
                "full bytes": before.manifest.num_bytes,
                "changed %": round(statistics.median(changed), 2),
                "further than 4 steps %": round(statistics.median(absolute), 1),
                "delta % of full": round(statistics.median(shares), 3),
                "largest %": round(max(shares), 3),
            }
        )
    return rows


# --- rates --------------------------------------------------------------------------------------------------------------


def best_of(runs: int, function: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def rates(_: argparse.Namespace) -> list[dict[str, Any]]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    before, after = (random_version(RATE_BYTES, version, 0.01) for version in (1, 2))
    delta = must(encode_delta(before, after))
    payload = delta.data.tobytes()

    def applied() -> float:
        held = HeldWeights()
        held.replace(before.manifest, bytearray(before.data.tobytes()))
        return best_of(1, lambda: held.apply(delta.manifest, payload))

    buffer = np.empty_like(after.data)
    times = {
        "memcpy": best_of(3, lambda: np.copyto(buffer, after.data)),
        "compare with the base": best_of(3, lambda: np.count_nonzero(before.data.view("<u2") != after.data.view("<u2"))),
        "encode the delta": best_of(3, lambda: encode_delta(before, after)),
        "apply it, all digests checked": min(applied() for _ in range(3)),
        "BLAKE2b of the version": best_of(2, lambda: tensor_digest(after.data.data)),
        "zstd of the version": best_of(1, lambda: compress(after.data.data)),
    }
    os.sched_setaffinity(0, cores)
    mebibytes = RATE_BYTES / 2**20
    return [{"what": what, "MiB/s of the version": round(mebibytes / seconds)} for what, seconds in times.items()]


# --- fleet --------------------------------------------------------------------------------------------------------------


class Serving:
    """The learner's end."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.store = SnapshotStore()
        self.registry = CollectorRegistry()
        metrics = LearnerMetrics(self.registry)
        self.gate = Gate(context, PLAINTEXT, MonotonicClock(), metrics.gate_counters)
        self.channel = RouterChannel(context, WEIGHTS, ANY_PORT, self.gate)
        self.server = WeightServer(self.channel, self.store, metrics)

    @property
    def sent(self) -> float:
        return self.registry.get_sample_value("gspo_learner_weight_bytes_sent_total") or 0.0


@asynccontextmanager
async def serving() -> AsyncIterator[Serving]:
    context = zmq.asyncio.Context()
    try:
        served = Serving(context)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(served.gate.run()), tasks.create_task(served.server.run())]
            yield served
            for task in running:
                task.cancel()
    finally:
        context.destroy(linger=0)


async def receive(endpoint: str, name: str, neighbours: bool) -> None:
    """One receiver: says so on standard output when it holds each of two versions."""
    context = zmq.asyncio.Context()
    clock = MonotonicClock()
    client = PeerClient(context, WEIGHTS, endpoint, role="rollout", peer=name, session=name, clock=clock)
    metrics = RolloutMetrics(CollectorRegistry())
    shared = (
        Neighbours(
            context, ANY_PORT, peer=name, session=name, clock=clock, metrics=metrics, security=PLAINTEXT, patience_s=30.0
        )
        if neighbours
        else None
    )
    held = HeldWeights() if shared is None else shared.held
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.run())
        if shared is not None:
            tasks.create_task(shared.run())
        await client.connected_welcome()
        while True:
            weights = await fetch_newest(client, held.policy_version, held, sources=shared, stall_s=60.0)
            if weights is not None:
                print(name, weights.policy_version, weights.digest, flush=True)
            await asyncio.sleep(0.02)


async def receivers(endpoint: str, names: Sequence[str], neighbours: bool) -> None:
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(receive(endpoint, name, neighbours))


async def one_fleet(number: int, neighbours: bool, versions: Sequence[Snapshot], delta: Delta) -> dict[str, Any]:
    row: dict[str, Any] = {"receivers": number, "neighbours": "yes" if neighbours else "no"}
    async with serving() as served:
        served.store.add(versions[0])
        num_processes = min(4, number)
        names = [f"rollout-{index}" for index in range(number)]
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.weight_updates", "--receive", served.channel.endpoint),
                *(["--neighbours"] if neighbours else []),
                *names[first::num_processes],
                stdout=asyncio.subprocess.PIPE,
            )
            for first in range(num_processes)
        ]
        try:
            await until_held(processes, number, versions[0])
            row["snapshot: sent / full"] = round(served.sent / versions[0].manifest.num_bytes, 2)
            before, begin = served.sent, time.perf_counter()
            served.store.add(versions[1], delta)
            await until_held(processes, number, versions[1])
            row["delta: sent / delta"] = round((served.sent - before) / delta.manifest.num_bytes, 2)
            row["delta: s until all hold it"] = round(time.perf_counter() - begin, 2)
        finally:
            for process in processes:
                process.terminate()
                await process.wait()
    return row


async def until_held(processes: Sequence[asyncio.subprocess.Process], number: int, snapshot: Snapshot) -> None:
    async def read(process: asyncio.subprocess.Process, expected: int) -> None:
        assert process.stdout is not None
        while expected:
            words = (await process.stdout.readline()).decode().split()
            # Beside the structured log's lines.
            if len(words) == 3 and words[1:] == [str(snapshot.policy_version), snapshot.manifest.digest]:
                expected -= 1
            elif not words:
                raise RuntimeError("a receiver ended")

    shares = [len(range(first, number, len(processes))) for first in range(len(processes))]
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        for process, share in zip(processes, shares, strict=True):
            tasks.create_task(read(process, share))


def fleet(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    versions = [random_version(FLEET_BYTES, version, 0.01) for version in (1, 2)]
    delta = must(encode_delta(versions[0], versions[1]))
    rows = []
    for neighbours in (False, True):
        for number in arguments.fleets:
            rows.append(asyncio.run(one_fleet(number, neighbours, versions, delta)))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


# --- pause --------------------------------------------------------------------------------------------------------------


class TimedEngine(Engine):
    """Notes how long each call of an update takes."""

    times: dict[str, float]

    async def timed(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        begin = time.perf_counter()
        result = await call
        self.times[what] = time.perf_counter() - begin
        return result

    async def pause(self, mode: PauseMode = "retract") -> None:
        self.times = {}
        await self.timed("stop", super().pause(mode))

    async def update_weights_from_disk(self, path: Path, version: int, *, flush_cache: bool | None = None) -> None:
        await self.timed("load", super().update_weights_from_disk(path, version, flush_cache=flush_cache))

    async def weights_checksums(self) -> dict[str, str]:
        return await self.timed("checksums", super().weights_checksums())

    async def resume(self) -> None:
        await self.timed("go on", super().resume())


async def pauses(directory: Path) -> list[dict[str, Any]]:
    model = a_model(hidden=256, layers=6, experts=16)
    model.to(torch.bfloat16).save_pretrained(directory / "model")
    build_tokenizer().save_pretrained(directory / "model")
    model.float()
    options = ServerOptions(
        model_path=directory / "model", log_path=directory / "sglang.log", dtype="bfloat16", max_total_tokens=4096
    )
    found: dict[str, list[dict[str, float]]] = {"snapshot": [], "delta": []}
    registry = CollectorRegistry()
    changed = asyncio.Event()
    async with serving() as served, EngineServer(options) as server, TimedEngine(server.url) as engine:
        context = zmq.asyncio.Context()
        sync = WeightSync(
            context=context,
            engine=engine,
            work_directory=directory / "work",
            pause_mode="retract",
            peer="rollout-0",
            session="s",
            clock=MonotonicClock(),
            metrics=RolloutMetrics(registry),
        )
        sync.on_change(changed.set)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(sync.run())
            for step in training(model, 1e-6):
                snapshot, newest = published(model, step), served.store.newest
                kind = "delta" if step > PAUSES else "snapshot"
                served.store.add(snapshot, encode_delta(newest, snapshot) if newest and kind == "delta" else None)
                before = registry.get_sample_value("gspo_rollout_generation_pause_seconds_sum") or 0.0
                sync.announce(step, served.channel.endpoint)
                await changed.wait()
                changed.clear()
                if sync.quarantined:
                    raise RuntimeError(sync.quarantined)
                after = registry.get_sample_value("gspo_rollout_generation_pause_seconds_sum") or 0.0
                found[kind].append({"pause": after - before, **engine.times})
                if step == 2 * PAUSES:
                    break
            running.cancel()
        context.destroy(linger=0)
        num_bytes = snapshot.manifest.num_bytes
    return [
        {
            "update": kind,
            "model MiB": round(num_bytes / 2**20),
            **{f"{what} ms": round(1000 * statistics.median(each[what] for each in times)) for what in times[0]},
            "pause / load": round(statistics.median(each["pause"] / each["load"] for each in times), 2),
        }
        for kind, times in found.items()
    ]


def pause(_: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="gspo-weight-updates-", dir="/dev/shm") as directory:
        return asyncio.run(pauses(Path(directory)))


# --- all ----------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "sizes": sizes,
    "rates": rates,
    "fleet": fleet,
    "pause": pause,
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--fleets", nargs="+", type=int, default=list(FLEETS), help="numbers of receivers")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--neighbours", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.receive:
        asyncio.run(receivers(arguments.receive, arguments.names, arguments.neighbours))
        return
    figures: dict[str, list[dict[str, Any]]] = {}
    for part in arguments.parts:
        figures[part] = PARTS[part](arguments)
        print(f"\n{part}\n\n{table(figures[part])}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
