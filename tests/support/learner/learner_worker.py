"""Runs as a rank or alone: the learner's engine in every ZeRO stage, its faults, checkpoints and exports.

python -m tests.support.learner.learner_worker WORK_DIR SCENARIO...; WORK_DIR holds model/ and groups.npz, results go there.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo.adaptive import AdaptiveClip
from gspo.mismatch import MismatchTracker
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, TrainGroup, pack
from gspo.model.policy import load_policy
from gspo.settings import Objective
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.checkpoints.format import CheckpointError, CheckpointState, load_checkpoint
from gspo_services.learner.checkpoints.saver import CheckpointSaver, Threads
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.engine.gradients import GradientError
from gspo_services.learner.export import export_model
from gspo_services.learner.profiling.profile import BatchProfile, HostTimeline, StepProfile
from gspo_services.learner.profiling.report import as_json
from gspo_services.learner.start.engine_settings import EngineSettings
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.lifecycle import leave
from gspo_services.shared.settings.sections import Learner, LoraSection
from tests.support.learner.trained import train as train_groups
from tests.support.loss.sequences import after_prompt, load_groups
from tests.support.policy.given_experts import with_own_experts

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.02,
    "warmup_steps": 2,
    "betas": (0.9, 0.999),
    "weight_decay": 0.1,
    "max_tokens_per_micro_batch": 60,
    "logprob_chunk_tokens": 16,
    # A large eps keeps Adam's update proportional to the gradient; a small one turns float noise into full steps.
    "adam_eps": 0.1,
}
SCHEDULED_RATE = 0.01
"""Of the batches after the first, as a schedule sets it."""
OBJECTIVE = Objective(eps_low=0.003, eps_high=0.003, noise_z=0.5, anchor="behaviour", tis_mode="off")
NUM_MINI_BATCHES = 2


def settings(
    *,
    routing_replay: bool = False,
    replays_engine: bool = False,
    with_penalties: bool = False,
    load_balance_coefficient: float = 0.0,
    expert_bias_rate: float = 0.0,
    lora: dict[str, Any] | None = None,
    leaves_device: bool = False,
    teacher: Path | None = None,
    **changes: Any,
) -> EngineSettings:
    """``SETTINGS`` and ``changes`` of the section learner, for a tiny model on DeepSpeed's accelerator."""
    return EngineSettings(
        learner=Learner(**(SETTINGS | changes)),
        device="cuda" if os.environ.get("DS_ACCELERATOR") == "cuda" else "cpu",
        max_sequence_tokens=None,
        routing_replay=routing_replay,
        replays_engine=replays_engine,
        seed=0,
        keeps_reference=with_penalties,
        teacher=teacher,
        entropy_gradient=with_penalties,
        load_balance_coefficient=0.001 if with_penalties else load_balance_coefficient,
        expert_bias_rate=expert_bias_rate,
        lora=LoraSection(**(lora or {})),
        leaves_device=leaves_device,
        zero3_persistence_elements=500,
    )


def train(
    engine: LearnerEngine, groups: list[TrainGroup], mismatch: MismatchTracker, anchor: str = "behaviour"
) -> dict[str, float]:
    objective = replace(OBJECTIVE, anchor=anchor)  # type: ignore[arg-type]
    trackers = Trackers(mismatch=mismatch)
    return train_groups(
        engine, groups, objective, policy_version=1, num_mini_batches=NUM_MINI_BATCHES, trackers=trackers
    ).metrics


def save_weights(engine: LearnerEngine, path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in engine.serving_weights()}
    if engine.rank == 0:
        save_file(weights, path)


def stages(work: Path) -> dict[str, Any]:
    """One batch in every stage; then a checkpoint, two more batches with and without resuming from it, an export."""
    groups = load_groups(work / "groups.npz")
    results: dict[str, Any] = {}
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for stage in (0, 1, 2, 3):
        engine = LearnerEngine.create(work / "model", settings(zero_stage=stage))
        mismatch = MismatchTracker()
        untouched = engine.weights_digest()
        metrics = train(engine, groups, mismatch)
        save_weights(engine, work / f"trained-{stage}-{world_size}.safetensors")
        state = CheckpointState(policy_version=2, batch_position=1, mismatch=dict(mismatch.state_dict()))
        saver = CheckpointSaver(engine, work / f"checkpoints-{stage}-{world_size}", keep=1, background=Threads())
        saver.begin(state)
        # Training continues while it is written.
        engine.set_learning_rate(SCHEDULED_RATE)
        train(engine, groups[::-1], mismatch, "proximal")
        went_on = engine.weights_digest()
        path = None
        while path is None:
            path = saver.advance(wait_s=1.0)

        resumed = LearnerEngine.create(work / "model", settings(zero_stage=stage))
        loaded = load_checkpoint(resumed, path)
        resumed_mismatch = MismatchTracker()
        resumed_mismatch.load_state_dict(loaded.mismatch)
        resumed_weights = resumed.weights_digest()
        resumed.set_learning_rate(SCHEDULED_RATE)
        next_rates = [each._engine.optimizer.param_groups[0]["lr"] for each in (engine, resumed)]
        train(resumed, groups[::-1], resumed_mismatch, "proximal")
        results[str(stage)] = {
            "metrics": metrics,
            "untouched": untouched,
            "went_on": went_on,
            "resumed_weights": resumed_weights,
            "resumed": resumed.weights_digest(),
            "next_rates": next_rates,
            "batch_position": loaded.batch_position,
        }
        if stage in (2, 3):
            export_model(
                resumed, work / f"export-{stage}-{world_size}", tokenizer_from=work / "model", max_shard_bytes=100_000
            )
            save_weights(resumed, work / f"exported-{stage}-{world_size}.safetensors")
    # ``resumed`` is in stage 3, and has trained.
    load_checkpoint(resumed, work / f"checkpoints-1-{world_size}" / path.name)
    results["other_stage"] = resumed.weights_digest()
    return results


def bfloat16(work: Path) -> dict[str, Any]:
    """One batch in bfloat16 with activation checkpointing; then the number of the host's reads from the device by token
    budget, and a profile of the last batch."""
    groups = load_groups(work / "groups.npz")
    engine = LearnerEngine.create(work / "model", settings(zero_stage=1, dtype="bfloat16", activation_checkpointing=True))
    metrics = train(engine, groups, MismatchTracker())
    save_weights(engine, work / "bfloat16.safetensors")
    reads = {}
    profiles: list[BatchProfile] = []
    for max_tokens_per_micro_batch in (60, 2000):
        engine.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        profile = StepProfile(
            HostTimeline(MonotonicClock()),
            rank=0,
            world_size=1,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            cost=engine.cost(),
            peak_flops=1e12,
            report=profiles.append,
        )
        engine.profile = profile
        with HostReads() as counted:
            train_groups(engine, groups, replace(OBJECTIVE, anchor="proximal"), policy_version=1)
        profile.end_batch(0, engine.sum_over_ranks)
        reads[profiles[-1].num_micro_batches] = counted.num_reads
    return {"metrics": metrics, "reads": reads, "profiles": [as_json(profile) for profile in profiles]}


class HostReads(TorchDispatchMode):
    """Counts operations that make the host wait for a device: reads of values, and sizes that depend on values."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if is_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"):
            self.num_reads += 1
        return func(*args, **(kwargs or {}))


def replay(work: Path) -> dict[str, Any]:
    """Two mini-batches with routing replay in ZeRO 1 and 3, with checkpointed activations, and without it."""
    groups = load_groups(work / "groups.npz")
    results: dict[str, Any] = {}
    for name, stage, changes in (
        ("free", 1, {"routing_replay": False}),
        ("replayed-1", 1, {}),
        ("replayed-3", 3, {}),
        ("replayed-shared", 3, {"expert_parallel": 2}),
        ("unchanged", 1, {"learning_rate": 1e-30}),
        ("reported", 3, {"expert_parallel": 2, "replays_engine": True}),
    ):
        # The first step is large enough to change experts, and the clip leaves their tokens a gradient.
        shared = {"routing_replay": True, "activation_checkpointing": True, "learning_rate": 0.2}
        engine = LearnerEngine.create(work / "model", settings(zero_stage=stage, **shared | changes))
        adaptive = AdaptiveClip(target=0.15)
        metrics = train_groups(
            engine,
            with_own_experts(engine, groups) if name == "reported" else groups,
            Objective(eps_low=0.15, eps_high=0.19, anchor="proximal"),
            policy_version=1,
            num_mini_batches=NUM_MINI_BATCHES,
            trackers=Trackers(adaptive_clip=adaptive),
        ).metrics
        save_weights(engine, work / f"{name}.safetensors")
        results[name] = {"metrics": metrics, "scale": adaptive.scale}
    config = Qwen3Config(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    try:
        LearnerEngine.from_model(Qwen3ForCausalLM(config), settings(zero_stage=1, routing_replay=True))
    except ValueError as error:
        results["dense"] = str(error)
    return results


def prompts(work: Path) -> dict[str, Any]:
    """A batch of groups that begin alike, with and without computing that once, and with replayed experts."""
    groups = [
        replace(group, sequences=tuple(after_prompt(np.arange(place, place + 12), each) for each in group.sequences))
        for place, group in enumerate(load_groups(work / "groups.npz"))
    ]
    results: dict[str, Any] = {}
    for name, changes in (("free", {}), ("replayed", {"routing_replay": True, "activation_checkpointing": True})):
        for shares in (False, True):
            engine = LearnerEngine.create(
                work / "model", settings(zero_stage=1, share_prompts=shares, max_tokens_per_micro_batch=300, **changes)
            )
            objective = Objective(eps_low=0.15, eps_high=0.19, anchor="proximal")
            results[f"{name}, {shares}"] = train_groups(
                engine, groups, objective, policy_version=1, num_mini_batches=NUM_MINI_BATCHES
            ).metrics
    return results


def reference(work: Path) -> dict[str, Any]:
    """The frozen start model and a teacher beside the policy, before and after a batch with KL term, entropy bonus and the
    teacher's advantages, in ZeRO 1 and 3."""
    groups = load_groups(work / "groups.npz")
    objective = replace(OBJECTIVE, kl_coefficient=0.1, entropy_coefficient=0.01)
    results: dict[str, Any] = {}
    for stage in (1, 3):
        chosen = settings(zero_stage=stage, with_penalties=True, teacher=work / "teacher")
        engine = LearnerEngine.create(work / "model", replace(chosen, float32_head=stage == 3))
        sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
        packed = pack(sequences, policy_version=1)

        def seen(engine: LearnerEngine = engine, packed: PackedBatch = packed) -> dict[str, list[float]]:
            own = engine.logprobs(packed).logprobs_T
            frozen = {"reference": engine.reference_logprobs(packed), "teacher": engine.teacher_logprobs(packed)}
            return {"own": own.tolist(), **{name: logprobs_T.tolist() for name, logprobs_T in frozen.items()}}

        before = seen()
        credit = AdvantageSettings(teacher_coefficient=0.1)
        metrics = train_groups(engine, groups, objective, policy_version=1, num_mini_batches=2, advantages=credit).metrics
        assert engine._reference is not None
        heads = [model.get_output_embeddings().float32 for model in (engine.model, engine._reference._model)]
        results[str(stage)] = {"before": before, "after": seen(), "metrics": metrics, "float32_heads": heads}
    return results


def faults(work: Path) -> dict[str, Any]:
    """Losses and models that allow no step; each fault hits only the last rank, except the frozen one."""
    groups = load_groups(work / "groups.npz")
    results: dict[str, Any] = {}

    def attempt(name: str, model: Any, loss_fn: Callable[[PackedBatch, TokenLogProbs, bool], Tensor]) -> None:
        engine = LearnerEngine.from_model(model, settings(zero_stage=2))
        sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
        packed = pack(sequences[engine.rank :: engine.world_size], policy_version=1)
        before = engine.weights_digest()
        is_last = engine.rank == engine.world_size - 1
        # Empty micro-batches take part and change nothing.
        micro_batches = [pack([], policy_version=1), packed]
        message = _message(lambda: engine.train_mini_batch(micro_batches, lambda p, r: loss_fn(p, r, is_last)))
        results[name] = {"message": message, "untouched": engine.weights_digest() == before}

    def sound(packed: PackedBatch, result: TokenLogProbs, is_last: bool) -> Tensor:
        assert bool(torch.isfinite(result.logprobs_T[packed.mask_T]).all()), "loss functions refuse NaN"
        return -(result.logprobs_T * packed.advantages_T).sum() / 100

    def nan_loss(packed: PackedBatch, result: TokenLogProbs, is_last: bool) -> Tensor:
        return sound(packed, result, is_last) * (math.nan if is_last else 1.0)

    def nan_gradient(packed: PackedBatch, result: TokenLogProbs, is_last: bool) -> Tensor:
        # Finite in value; the derivative of sqrt at 0 is infinite.
        return (result.logprobs_T * 0).abs().sqrt().sum() if is_last else sound(packed, result, is_last)

    frozen = load_policy(work / "model", torch.float32)
    frozen.get_parameter("model.layers.1.mlp.gate.weight").requires_grad_(False)
    attempt("frozen", frozen, sound)
    attempt("nan_loss", load_policy(work / "model", torch.float32), nan_loss)
    attempt("nan_gradient", load_policy(work / "model", torch.float32), nan_gradient)
    attempt("sound", load_policy(work / "model", torch.float32), sound)
    # A token that only the last rank trains on, so that the other one sees nothing wrong by itself.
    members = [sequence for group in groups for sequence in group.sequences]
    world_size = int(os.environ["WORLD_SIZE"])
    others = [members[index].token_ids for index in range(len(members)) if index % world_size != world_size - 1]
    token = int(np.setdiff1d(members[world_size - 1].token_ids, np.concatenate(others))[0])
    broken = load_policy(work / "model", torch.float32)
    with torch.no_grad():
        broken.get_input_embeddings().weight[token] = math.nan
    attempt("nan_model", broken, sound)
    results["rates"] = [rates(work, groups, stage) for stage in RATED_STAGES]
    return results


RATED_STAGES = (1, 3)


def rates(work: Path, groups: list[TrainGroup], stage: int) -> dict[str, Any]:
    """A step whose learning rate has the factor 0, and one without a factor."""
    engine = LearnerEngine.create(work / "model", settings(zero_stage=stage, warmup_steps=0))
    sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
    packed = pack(sequences[engine.rank :: engine.world_size], policy_version=1)

    def loss_fn(packed: PackedBatch, result: TokenLogProbs) -> Tensor:
        return -(result.logprobs_T * packed.advantages_T).sum() / 100

    digests, used = [engine.weights_digest()], []
    for scale in (lambda: 0.0, None):
        used.append(engine.train_mini_batch([packed], loss_fn, rate_scale=scale).learning_rate)
        digests.append(engine.weights_digest())
    return {"learning_rates": used, "moved": [before != after for before, after in pairwise(digests)]}


MOVABLE: dict[str, dict[str, Any]] = {
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2, "dtype": "bfloat16"},
    "offload": {"zero_stage": 2, "offload": "optimizer"},
    "adapters": {"zero_stage": 2, "lora": {"rank": 4}},
    "reference": {"zero_stage": 2, "with_penalties": True},
}
IMMOVABLE: dict[str, dict[str, Any]] = {
    "0": {"zero_stage": 0},
    "1 in bfloat16": {"zero_stage": 1, "dtype": "bfloat16"},
    "3": {"zero_stage": 3},
}


def leaving(work: Path) -> dict[str, Any]:
    """Two batches by an engine that leaves its device between them, and by one that stays; and what cannot leave."""
    groups = load_groups(work / "groups.npz")
    results: dict[str, Any] = {"digests": {}, "losses": {}, "where": {}, "refused": {}}
    for name, changes in MOVABLE.items():
        digests, losses = [], []
        for leaves in (False, True):
            engine = LearnerEngine.create(work / "model", settings(leaves_device=leaves, **changes))
            mismatch = MismatchTracker()
            for _ in range(2):
                if leaves:
                    engine.leave_device()
                    engine.leave_device()  # It has left.
                    engine.return_to_device()
                found = train(engine, groups, mismatch)
            losses.append(found["loss"])
            if leaves:
                steps = [state["step"] for state in engine._engine.optimizer.optimizer.state.values()]
                results["where"][name] = sorted({step.device.type for step in steps})
            digests.append(engine.weights_digest())
        results["digests"][name] = digests
        results["losses"][name] = losses
    for name, changes in IMMOVABLE.items():
        try:
            LearnerEngine.create(work / "model", settings(leaves_device=True, **changes)).leave_device()
        except (AttributeError, AssertionError) as error:
            results["refused"][name] = str(error)
    return results


def alone(work: Path) -> dict[str, Any]:
    """Two batches on one rank in ZeRO 1, which runs without ZeRO, and in DeepSpeed's own ZeRO 1, by clipping: metrics,
    digests; and each one's checkpoint after the first batch, continued by the other."""
    groups = load_groups(work / "groups.npz")
    results: dict[str, Any] = {}
    for max_grad_norm in (0.0, 0.001, 1000.0):
        chosen = {"zero_stage": 1, "max_grad_norm": max_grad_norm, "lora": {"rank": 2} if max_grad_norm == 1000 else None}
        # Two groups of parameters, each with a norm of its own.
        chosen["router_rate_factor"] = 0.5 if max_grad_norm == 0.001 else 1.0
        found: dict[str, Any] = {"inside": [], "metrics": [], "digests": []}
        for flat in (False, True):
            engine = LearnerEngine.create(work / "model", settings(leaves_device=flat, **chosen))
            mismatch = MismatchTracker()
            first = train(engine, groups, mismatch)
            seen = dict(mismatch.state_dict())
            engine.save_state(work / f"alone-{max_grad_norm}-{flat}")
            second = train(engine, groups[::-1], mismatch)
            found["inside"].append(type(engine._engine.optimizer).__name__)
            found["metrics"].append([first, second])
            found["digests"].append(engine.weights_digest())
        for flat in (False, True):
            engine = LearnerEngine.create(work / "model", settings(leaves_device=flat, **chosen))
            engine.load_state(work / f"alone-{max_grad_norm}-{not flat}")
            mismatch = MismatchTracker()
            mismatch.load_state_dict(seen)
            train(engine, groups[::-1], mismatch)
            found["digests"].append(engine.weights_digest())
        results[str(max_grad_norm)] = found
    return results


def _message(action: Callable[[], object]) -> str:
    try:
        action()
    except (CheckpointError, GradientError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "stages": stages, "bfloat16": bfloat16, "replay": replay, "reference": reference, "faults": faults,
    "leaving": leaving, "alone": alone, "prompts": prompts,
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    work = Path(sys.argv[1])
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    for scenario in sys.argv[2:]:
        results = SCENARIOS[scenario](work)
        (work / f"{scenario}-{rank}-of-{world_size}.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
