"""How long an update stops generation in a real SGLang server, compared with SGLang's own load of the same file."""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry

from benchmarks.weight_updates.serving import serving
from benchmarks.weight_updates.versions import a_model, must, published, step
from gspo_services.learner.weights import encode_delta
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang import Engine, EngineHttp, EngineServer, ServerOptions
from gspo_services.rollout.weights import WeightSync
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.weights import PATCHER, SUMMER

WARM: Final = 2
HIDDEN: Final = (256, 512)
"""Sizes of the model: 39 and 155 MiB in bfloat16."""
CALLS: Final = {
    "/pause_generation": "stop",
    "/update_weights_from_disk": "load",
    "/begin_weight_update": "begin",
    "/end_weight_update": "end",
    PATCHER: "load",
    SUMMER: "sums",
    "/continue_generation": "go on",
}
"""By the path, or the loader that is called there."""


class TimedHttp(EngineHttp):
    """Records the seconds of each call of the last update."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout_s=30.0, stall_timeout_s=300.0)
        self.times: dict[str, float] = {}

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> bytes:
        begin = time.perf_counter()
        answer = await super().post(path, body, timeout_s=timeout_s)
        name = CALLS[body["load_format"] if path == "/update_weights_from_tensor" else path]
        self.times[name] = time.perf_counter() - begin
        return answer


class TimedEngine(Engine):
    """A client whose calls are timed."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._http = self.timed = TimedHttp(url)


def pause(num_updates: int) -> list[dict[str, Any]]:
    """Return medians over ``num_updates`` snapshots and as many deltas of 1 % of the elements, for each model size."""
    rows: list[dict[str, Any]] = []
    for hidden in HIDDEN:
        with tempfile.TemporaryDirectory(prefix="gspo-weight-updates-", dir="/dev/shm") as directory:
            rows += asyncio.run(_pauses(Path(directory), num_updates, hidden))
    return rows


async def _pauses(directory: Path, num_updates: int, hidden: int) -> list[dict[str, Any]]:
    model = a_model(hidden=hidden, layers=6, experts=16).to(torch.bfloat16)
    model.save_pretrained(directory / "model")
    build_tokenizer().save_pretrained(directory / "model")
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
            running = tasks.create_task(sync.run(), name="sync")
            for version in range(1, 2 * (WARM + num_updates) + 1):
                newest, kind = served.store.newest, "snapshot" if version <= WARM + num_updates else "delta"
                with torch.no_grad():
                    step([parameter.data for parameter in model.parameters()], 0.01, seed=version)
                snapshot = published(model, version)
                served.store.add(snapshot, must(encode_delta(newest, snapshot)) if newest and kind == "delta" else None)
                paused_s = _paused_s(registry)
                sync.announce(version, served.endpoint)
                async with asyncio.timeout(300):
                    await changed.wait()
                changed.clear()
                if sync.quarantined:
                    raise RuntimeError(sync.quarantined)
                found[kind].append({"pause": _paused_s(registry) - paused_s, **engine.timed.times})
            running.cancel()
        context.destroy(linger=0)
    return [_row(kind, times[WARM:], snapshot.manifest.num_bytes) for kind, times in found.items()]


def _row(kind: str, times: list[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    ratios = sorted(each["pause"] / each["load"] for each in times)
    return {
        "update": kind,
        "model MiB": round(num_bytes / 2**20),
        **{f"{what} ms": round(1000 * statistics.median(each[what] for each in times), 1) for what in times[0]},
        "pause / load": round(statistics.median(ratios), 2),
        "best": round(ratios[0], 2),
        "worst": round(ratios[-1], 2),
    }


def _paused_s(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("gspo_rollout_generation_pause_seconds_sum") or 0.0
