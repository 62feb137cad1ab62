"""Adapters of a real learner, a real SGLang server that can hold them, and a WeightSync between the two."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry
from safetensors.torch import save_file

from gspo_protocol.messages import Loaded
from gspo_services.learner.weights.adapter_copy import PublishedBase
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.generation import GenerateRequest, OutputPiece, SamplingParameters
from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions
from gspo_services.rollout.weights.adapter_loader import AdapterPlan, lora_arguments
from gspo_services.rollout.weights.sync import WeightSync
from gspo_services.shared.net import Incoming
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.engines.adapter_worker import LORA, NUM_VERSIONS, read_version
from tests.support.learner.ranks import Ranks
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe
from tests.support.learner.training_groups import write_model_and_groups
from tests.support.wire.served_weights import Served
from tests.support.wire.zmq_ends import PATIENCE_S, in_background, zmq_context

SLOTS = 2
PLAN = AdapterPlan(rank=LORA["rank"], alpha=LORA["alpha"], slots=SLOTS, tolerance=1e-4, mode="retract")
PROMPT = [10, 20, 30, 40, 50, 60, 70, 80]


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What a learner published, and a server with the model that it began with."""

    work: Path
    url: str
    adapters: dict[int, Snapshot]
    merged: dict[int, Snapshot]
    base: Snapshot

    def model(self, version: int) -> Any:
        """The version in transformers, from its merged weights."""
        model = tiny_qwen3_moe()
        saved = self.work / f"model-{version}"
        if not saved.is_dir():
            model.save_pretrained(saved)
            save_file(tensors_of(self.merged[version]), saved / "model.safetensors", metadata={"format": "pt"})
        return type(model).from_pretrained(saved).eval()

    def renumbered(self, version: int, number: int) -> Snapshot:
        """The adapter of a version under another number."""
        snapshot = self.adapters[version]
        return Snapshot(manifest=structs.replace(snapshot.manifest, policy_version=number), weights=snapshot.weights)


def tensors_of(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """The tensors of a version in float32."""
    return {
        info.name: torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy()).view(info.shape)
        for info, data in zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True)
    }


@contextlib.asynccontextmanager
async def learn_and_serve(work: Path) -> AsyncIterator[Learnt]:
    """Let a learner publish a few versions below ``work`` while the server starts."""
    write_model_and_groups(work)
    options = ServerOptions(
        model_path=work / "model",
        log_path=work / "server.log",
        max_total_tokens=16384,
        lora_args=tuple(lora_arguments(PLAN.rank, SLOTS)),
    )
    with Ranks("tests.support.engines.adapter_worker", [str(work)], 1, work / "worker") as learner:
        async with EngineServer(options) as server:
            await asyncio.to_thread(learner.finish, 600)
            yield Learnt(
                work=work,
                url=server.url,
                adapters={version: read_version(work, f"adapter-{version}") for version in range(1, NUM_VERSIONS + 1)},
                merged={version: read_version(work, f"merged-{version}") for version in range(1, NUM_VERSIONS + 1)},
                base=read_version(work, "base"),
            )


class Following:
    """A WeightSync between a real weight server and the real engine."""

    def __init__(self, context: Any, learnt: Learnt, engine: Engine, directory: Path, plan: AdapterPlan) -> None:
        self.learnt, self.engine = learnt, engine
        self.served = Served(context)
        self.served.server.keep_base(PublishedBase(copy_weights(tensors_of(learnt.base).items())))
        self._reports: asyncio.Queue[Loaded] = asyncio.Queue()
        self.served.server.on_loaded = self._note  # type: ignore[method-assign]
        self.registry = CollectorRegistry()
        self.sync = WeightSync(
            context=context,
            engine=engine,
            work_directory=directory,
            pause_mode=plan.mode,
            peer="rollout-0",
            session="s",
            clock=MonotonicClock(),
            metrics=RolloutMetrics(self.registry),
            retry_s=0.05,
            adapters=plan,
        )
        self.changed = asyncio.Event()
        self.sync.on_change(self.changed.set)

    def _note(self, incoming: Incoming, loaded: Loaded) -> None:
        self._reports.put_nowait(loaded)

    async def report(self) -> Loaded:
        """What the rollout says next to the learner."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reports.get()

    def publish(self, snapshot: Snapshot) -> None:
        self.served.store.add(snapshot)
        self.sync.announce(snapshot.policy_version, self.served.endpoint)

    async def serve(self, version: int) -> None:
        """Publish a version, and wait until it is served."""
        self.changed.clear()
        self.publish(self.learnt.adapters[version])
        await self.served_one()
        assert (self.sync.policy_version, self.sync.quarantined) == (version, "")
        assert (await self.report()).error == ""

    async def served_one(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.changed.wait()
        self.changed.clear()

    def outcomes(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_updates_total", {"outcome": outcome})


@contextlib.asynccontextmanager
async def following(learnt: Learnt, directory: Path, plan: AdapterPlan = PLAN) -> AsyncIterator[Following]:
    async with (
        zmq_context() as context,
        Engine(learnt.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as engine,
    ):
        follow = Following(context, learnt, engine, directory / "work", plan)
        async with in_background(follow.served.authenticator.run(), follow.served.server.run(), follow.sync.run()):
            yield follow


async def collect(engine: Engine, rid: str, num_tokens: int, begun: asyncio.Event | None = None) -> list[OutputPiece]:
    """An answer of this many tokens; ``begun`` is set when its first piece is there."""
    sampling = SamplingParameters(max_new_tokens=num_tokens, ignore_eos=True, seed=1)
    pieces = []
    async for piece in engine.generate(GenerateRequest(rid=rid, input_ids=PROMPT, sampling=sampling)):
        pieces.append(piece)
        if begun is not None:
            begun.set()
    return pieces


def joined(pieces: list[OutputPiece]) -> tuple[list[int], np.ndarray[Any, Any], list[int]]:
    """Token ids, log-probs and versions of a whole answer."""
    versions = [run.version for piece in pieces for run in piece.version_runs for _ in range(run.num_tokens)]
    token_ids = [int(token) for piece in pieces for token in piece.token_ids]
    assert pieces[-1].finish_reason == "length"
    return token_ids, np.concatenate([piece.logprobs for piece in pieces]), versions
