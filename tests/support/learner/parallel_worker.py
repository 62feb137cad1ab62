"""Runs under torchrun: the learner's engine in one parallel layout after the other, and its checkpoints in others.

python -m tests.support.learner.parallel_worker PLAN.json RESULTS_DIR; the plan is a list of jobs, see ``Job``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo.model.packing import TrainGroup, pack
from gspo_services.learner.checkpoints.format import CheckpointError, CheckpointState, load_checkpoint
from gspo_services.learner.checkpoints.saver import CheckpointSaver, Threads
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.export import export_model
from gspo_services.learner.weights.weight_copy import WeightCopy, copy_parameters, copy_ranges
from gspo_services.shared.runtime.lifecycle import leave
from tests.support.learner.checkpoints import find_latest
from tests.support.learner.learner_worker import OBJECTIVE, settings
from tests.support.learner.trained import train
from tests.support.loss.sequences import every_token_an_action, load_groups
from tests.support.policy.given_experts import Replayed, replay_step, with_own_experts, with_reported

WIDE = replace(OBJECTIVE, eps_low=0.19, eps_high=0.19)
PENALISED = replace(WIDE, anchor="proximal", kl_coefficient=0.1, kl_in="loss", entropy_coefficient=0.01)
SLOW: dict[str, Any] = {"learning_rate": 0.002}
"""With larger steps everything would be clipped after the second, so that later steps would show nothing."""


@dataclass(frozen=True)
class Job:
    """One engine: made, perhaps resumed, trained for some steps, perhaps saved."""

    name: str
    settings: dict[str, Any]
    model: str = "model"
    groups: str = "groups.npz"
    penalties: bool = False
    """Anchor at the batch's start, a KL term and an entropy bonus."""
    count_saved: bool = False
    """Count the bytes that autograd keeps for backward."""
    resume: str = ""
    """The job whose checkpoint to resume from."""
    steps: int = 1
    save_after: int = 0
    """Save a checkpoint below NAME after this many steps; 0: never."""
    replay: bool = False
    """Instead of ``steps``: one step on a plain loss, with the experts of ``given_picks`` instead of the routers' own. After
    the checkpoint another one, in which two experts of what is replayed are swapped."""
    reported: str = ""
    """"given": every other sequence has experts that an engine reported, see ``with_reported``. "own": all sequences have
    this learner's own, two of which are swapped in every second step."""
    unwritable_on: int = -1
    """This rank can write no file of more than 4 KiB."""
    in_background: bool = False
    """Save in the background, and continue once it is written."""
    export: bool = False
    """Write the weights as engines load them to NAME.safetensors, and an export to NAME-export."""


def _save(engine: LearnerEngine, root: Path, state: CheckpointState, in_background: bool) -> None:
    saver = CheckpointSaver(engine, root, keep=1, background=Threads() if in_background else None)
    saver.begin(state)
    while saver.pending is not None:
        saver.advance(wait_s=1.0)


def run(job: Job, work: Path) -> dict[str, Any]:
    groups = load_groups(work / job.groups)
    if job.reported == "given":
        groups = with_reported(groups)
    chosen = settings(**(SLOW | job.settings))
    if job.penalties:
        chosen = replace(chosen, keeps_reference=True, entropy_gradient=True)
    engine = LearnerEngine.create(work / job.model, chosen)
    saved: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if engine.rank == job.unwritable_on:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        first = 0
        if job.resume:
            latest = find_latest(work / job.resume)
            assert latest is not None, f"{job.resume} has no checkpoint"
            first = load_checkpoint(engine, latest).batch_position
        losses, norms, rates, experts, scored = list[float](), list[float](), list[float](), list[dict[str, float]](), []
        replays: list[Replayed] = []
        if job.replay:
            replays.append(replay_step(engine, groups))
            losses.append(replays[0]["loss"])
            state = CheckpointState(policy_version=1, batch_position=1, mismatch={})
            _save(engine, work / job.name, state, job.in_background)
            replays.append(replay_step(engine, groups, swap=True))
        for step in range(first, first + (0 if job.replay else job.steps)):
            # As the learner does before each batch, with or without a schedule.
            engine.set_learning_rate(chosen.learner.learning_rate)
            with _counting(engine, saved) if job.count_saved else nullcontext():
                # All groups but one, another one in each step; a single group in each.
                chosen_groups = [each for at, each in enumerate(groups) if at != step % len(groups) or len(groups) == 1]
                if job.reported == "own":
                    chosen_groups = with_own_experts(engine, groups, swap=step % 2 == 1)
                metrics = train(engine, chosen_groups, PENALISED if job.penalties else WIDE, policy_version=1).metrics
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
            rates.append(metrics["learning_rate"])
            experts.append({name: value for name, value in metrics.items() if name.startswith("expert")})
            if step + 1 == job.save_after:
                state = CheckpointState(policy_version=1, batch_position=step + 1, mismatch={})
                _save(engine, work / job.name, state, job.in_background)
        if job.export:
            weights = {name: tensor.clone() for name, tensor in engine.serving_weights()}
            if engine.rank == 0:
                save_file(weights, work / f"{job.name}.safetensors")
            export_model(engine, work / f"{job.name}-export", tokenizer_from=work / "model")
            scored = score(engine, groups)
        return {
            "losses": losses,
            "norms": norms,
            "rates": rates,
            "experts": experts[-1] if experts else {},
            "experts_of_steps": experts,
            "replays": replays,
            "scored": scored,
            "saved_bytes": sum(saved),
            "digest": engine.weights_digest(),
            "versions": _versions(engine) if not chosen.lora.rank else [],
            "layout": engine.layout(),
            "offloaded": _offloaded(engine),
            "masters_on": sorted({master.device.type for master in engine._state._masters()}),
        }
    except CheckpointError as error:
        return {"error": str(error), "digest": engine.weights_digest()}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Whatever ranks do together is an error inside."""
    together = AssertionError("ranks exchange weights")
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(deepspeed.zero, "GatheredParameters", side_effect=together))
        for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "gather", "all_to_all_single"):
            patches.enter_context(mock.patch.object(torch.distributed, name, side_effect=together))
            patches.enter_context(mock.patch.object(deepspeed.comm, name, side_effect=together, create=True))
        yield


def _versions(engine: LearnerEngine) -> list[str]:
    """The digest of a version in bfloat16: of what each rank has, without gathering, and on rank 0 of the whole."""
    ranges = engine.own_ranges(torch.bfloat16)
    with nothing_gathered():
        own = WeightCopy(ranges.layout, copy_ranges(ranges.of_now()))
    row = torch.from_numpy(own.row().view("i8"))
    covered = torch.tensor([sum(len(piece.data) for piece in own.pieces)])
    if engine.world_size > 1:
        torch.distributed.all_reduce(row)
        torch.distributed.all_reduce(covered)
    assert int(covered) == ranges.layout.num_bytes, "each element is on one rank"
    whole = copy_parameters(engine.served_parameters(torch.bfloat16))
    gathered = [whole.digest() if engine.rank == 0 else ""]
    if engine.world_size > 1:
        torch.distributed.broadcast_object_list(gathered)
    return [ranges.layout.digest(row.numpy().view("u8")), *gathered]


@contextmanager
def _counting(engine: LearnerEngine, saved: list[int]) -> Iterator[None]:
    """Note the bytes of each tensor that autograd keeps inside, weights aside, each storage once a step."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and place not in kept:
            # Held until the end, or another tensor could get the place of a freed one.
            kept[place] = tensor.detach()
            saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def score(engine: LearnerEngine, groups: list[TrainGroup]) -> list[tuple[list[int], list[float]]]:
    """The token ids of every sequence, and this learner's log-probs of all but the first at temperature 1."""
    members = [every_token_an_action(sequence) for group in groups for sequence in group.sequences]
    assert {member.temperature for member in members} == {1.0}
    packed = pack(members, policy_version=1)
    logprobs = engine.logprobs(packed).logprobs_T.tolist()
    return [
        (member.token_ids.tolist(), logprobs[start : end - 1])
        for member, (start, end) in zip(members, pairwise(packed.cu_seqlens), strict=True)
    ]


def _offloaded(engine: LearnerEngine) -> list[bool]:
    """Whether DeepSpeed keeps the optimizer, and the parameters, in the host's memory."""
    found = vars(engine._engine.optimizer)
    return [bool(found.get("offload_optimizer") or found.get("cpu_offload")), bool(found.get("offload_param"))]


def main() -> None:
    torch.set_num_threads(1)
    plan, work = Path(sys.argv[1]), Path(sys.argv[2])
    results = {}
    for content in json.loads(plan.read_text(encoding="utf-8")):
        job = Job(**content)
        try:
            results[job.name] = run(job, work)
        except ValueError as error:
            results[job.name] = {"error": str(error)}
    rank = os.environ.get("RANK", "0")
    plan.with_suffix(f".{rank}.out").write_text(json.dumps(results), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
