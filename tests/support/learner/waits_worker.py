"""Runs alone: the learner's engine, DeepSpeed and trainer on a claimed device, and what made the host wait for it.

python -m tests.support.learner.waits_worker PLAN.json; the plan is a list of ``waits.Case``; the counts go to PLAN.out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from gspo.adaptive import AdaptiveClip
from gspo.model.packing import TrainGroup
from gspo.settings import Objective
from gspo_protocol.messages import Batch, BatchItem
from gspo_services.learner.advantages import AdvantageSettings
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.engine import configuration
from gspo_services.learner.engine import engine as engine_module
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.engine.frozen import FrozenModel
from gspo_services.learner.engine.own_ranges import PublishedRanges
from gspo_services.learner.engine.process_group import init_distributed
from gspo_services.learner.start import EngineSettings
from gspo_services.learner.token_dump import TokenDump
from gspo_services.learner.weights import weight_copy
from gspo_services.learner.weights.copy_memory import CopyMemory
from gspo_services.shared.runtime.lifecycle import leave
from gspo_services.shared.settings.sections import Learner, LoraSection
from tests.gpu.half_hour.shapes import SMALL, moe_config
from tests.support.learner.claimed_device import DEVICE, ClaimedDevice
from tests.support.learner.trained import train
from tests.support.learner.waits import Case, Counts
from tests.support.loss.sequences import random_groups

SHAPE = SMALL | {"vocab_size": 500, "hidden_size": 64}
ROOM = 96
"""Tokens of a micro-batch."""
PLANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda states: states * states.abs().max().item() ** 0,
    "host": lambda states: states * torch.ones(states.shape[-1], dtype=states.dtype),
    "cpu": lambda states: states.cpu().to(DEVICE),
    "mask": lambda states: states + 0 * states[states > 0].sum(),
}


PUBLISHED: dict[str, Callable[[Tensor], Tensor]] = {
    "copied": lambda whole: whole.cpu(),
    "looked at": lambda whole: whole * whole.abs().max().item() ** 0,
}
"""Faults of what is published."""


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """DeepSpeed's tensors are on the claimed device, and Adam is fused, as it is on a GPU."""
    # Before DeepSpeed gives its device another name.
    init_distributed("cpu", 60.0)
    original = configuration.deepspeed_config

    def fused(*arguments: Any) -> dict[str, Any]:
        config = original(*arguments)
        config["optimizer"]["params"]["fused"] = True
        return config

    accelerator = type(get_accelerator())
    with (
        mock.patch.object(accelerator, "current_device_name", return_value=str(DEVICE)),
        mock.patch.object(accelerator, "device_name", return_value=str(DEVICE)),
        mock.patch.object(engine_module, "deepspeed_config", fused),
        mock.patch.object(engine_module, "init_distributed"),
    ):
        yield


def made(case: Case) -> LearnerEngine:
    """The engine of a case, its model on the device."""
    learner = Learner(**({"max_tokens_per_micro_batch": ROOM} | case.learner))

    def model() -> Qwen3MoeForCausalLM:
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(moe_config(SHAPE, case.layers)).to(DEVICE, getattr(torch, learner.dtype))

    settings = EngineSettings(
        **({"routing_replay": False} | case.engine),
        learner=learner, lora=LoraSection(**case.lora), device="cpu", max_sequence_tokens=None, seed=0,
    )  # fmt: skip
    reference, teacher = (
        FrozenModel(model(), DEVICE, logprob_chunk_tokens=64) if wanted else None
        for wanted in (settings.keeps_reference, settings.teacher)
    )
    return LearnerEngine.from_model(model(), settings, reference, teacher=teacher)


def groups_of(*, episodes: bool) -> list[TrainGroup]:
    groups = random_groups(4, 4, seed=1, vocab_size=SHAPE["vocab_size"], versions=(0, 1))
    if not episodes:
        return groups
    return [replace(each, rewards=each.rewards[:2], turn_rewards=None, sequences_per_episode=(2, 2)) for each in groups]


def train_one(engine: LearnerEngine, objective: Objective, batch: dict[str, Any], steps: int, work: Path) -> None:
    """One batch."""
    more = dict(batch)
    groups, dump = groups_of(episodes=more.pop("episodes", False)), None
    if more.pop("dump", False):
        numbers = [(number, member) for number, group in enumerate(groups) for member in range(len(group.sequences))]
        items = [BatchItem(4 * number + member, number, 1, 1, 1, 1, "done", 1.0, 64) for number, member in numbers]
        message = Batch(index=7, policy_version=1, part_tokens=1, items=items)
        dump = TokenDump(work, message, groups, rank=0, world_size=1)
    adaptive = AdaptiveClip(target=0.2) if more.pop("adaptive", False) else None
    train(
        engine, groups, objective, policy_version=1, num_mini_batches=steps, trackers=Trackers(adaptive_clip=adaptive),
        advantages=AdvantageSettings(**more), token_dump=dump,
    )  # fmt: skip


def of_objective(
    engine: LearnerEngine, claimed: ClaimedDevice, objective: Objective, case: Case, work: Path
) -> dict[str, Counts]:
    """Of a batch of two steps, of one in smaller micro-batches, and of one of four steps."""
    found = {}
    phases = [("batch", ROOM, 2), ("fine", ROOM // 2, 2), ("steps", ROOM, 4)]
    if case.warm:
        train_one(engine, objective, case.batch, 2, work)
        claimed.take()
    micro_batches = []
    for name, room, steps in phases:
        engine.max_tokens_per_micro_batch = room
        with mock.patch.object(engine, "train_mini_batch", wraps=engine.train_mini_batch) as made_steps:
            train_one(engine, objective, case.batch, steps, work)
        micro_batches.append(sum(len(call.args[0]) for call in made_steps.call_args_list))
        found[name] = claimed.take()
    assert micro_batches[1] >= 2 * micro_batches[0], f"these compare nothing: {micro_batches}"
    return found


def of_states(engine: LearnerEngine, claimed: ClaimedDevice, work: Path) -> dict[str, Counts]:
    """When the state is saved, loaded and trained on, served, and away from the device for a while."""

    def one_more() -> None:
        train_one(engine, Objective(), {}, 2, work)

    phases: list[tuple[str, Callable[[], object]]] = [
        ("save", lambda: engine.save_state(work / "state")),
        ("load", lambda: engine.load_state(work / "state")),
        ("trained after load", one_more),
        ("serve", lambda: [tensor.sum() for _, tensor in engine.serving_weights()]),
    ]
    if engine.settings.leaves_device:
        phases += [("leave", engine.leave_device), ("return", engine.return_to_device), ("trained after return", one_more)]
    found = {}
    for name, act in phases:
        act()
        found[name] = claimed.take()
        if name == "leave":
            left = [each for each, value in engine.model.named_parameters() if claimed.has(value)]
            assert not left, f"still on the device: {left}"
    return found


@contextmanager
def publishing(claimed: ClaimedDevice) -> Iterator[None]:
    """Copies to the host's memory as from a GPU. Nothing is pinned, because there is none."""
    take = CopyMemory.take
    with (
        mock.patch.object(CopyMemory, "take", lambda self, num_bytes, *, pinned: take(self, num_bytes, pinned=False)),
        mock.patch.object(weight_copy, "_keep_until_copied"),
        mock.patch.object(weight_copy, "_wait_for_copies", side_effect=lambda: claimed.note("waits: synchronize")),
    ):
        yield


def of_publications(engine: LearnerEngine, claimed: ClaimedDevice) -> dict[str, Counts]:
    """The copy of a version that training waits for, as it is and with a fault of each kind in what is served."""
    own, found = PublishedRanges._own_part, {}
    # The layout is found once.
    ranges = engine.own_ranges(torch.bfloat16)
    with publishing(claimed):
        claimed.take()
        for name, change in {"": lambda values: values, **PUBLISHED}.items():

            def changed(self: Any, value: Tensor, change: Callable[[Tensor], Tensor] = change) -> tuple[int, Tensor]:
                start, values = own(self, value)
                return start, change(values)

            with mock.patch.object(PublishedRanges, "_own_part", changed):
                weight_copy.copy_ranges(ranges.of_now())
            found[name] = claimed.take()
    return found


def of_plants(engine: LearnerEngine, claimed: ClaimedDevice, case: Case, work: Path) -> dict[str, Counts]:
    """A batch with each fault in the first layer's MLP."""
    found = {}
    for plant in case.plants:
        change = PLANTS[plant]
        handle = engine.model.model.layers[0].mlp.register_forward_hook(lambda *given, change=change: change(given[-1]))
        train_one(engine, Objective(), {}, 2, work)
        found[plant] = claimed.take()
        handle.remove()
    return found


def main(plan: Path) -> None:
    results: dict[str, dict[str, dict[str, Counts]]] = {}
    for content in json.loads(plan.read_text(encoding="utf-8")):
        case = Case(**content)
        work = plan.parent / case.name
        work.mkdir()
        with as_on_a_gpu(), ClaimedDevice() as claimed:
            engine = made(case)
            found = {"start": {"made": claimed.take()}}
            for name, options in case.objectives.items():
                found[name] = of_objective(engine, claimed, Objective(**options), case, work)
            if case.states:
                found["states"] = of_states(engine, claimed, work)
            found["plants"] = of_plants(engine, claimed, case, work)
            if case.publishes:
                found["publications"] = of_publications(engine, claimed)
        results[case.name] = found
    plan.with_suffix(".out").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
