"""With every option of the loss and in every ZeRO stage: no micro-batch makes the host wait for a device, nor does a layer,
and no operation has tensors of host and device. The device is claimed: see tests/support/learner/claimed_device.py.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.support.learner.waits import Case, Counts, Waits, counted, waits

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

OBJECTIVES: Final[dict[str, dict[str, Any]]] = {
    "proximal": {"anchor": "proximal"},
    "tokens truncated": {"anchor": "proximal", "tis_mode": "truncate_tokens"},
    "tokens rejected": {"anchor": "proximal", "tis_mode": "reject_tokens"},
    "products truncated": {"anchor": "proximal", "tis_mode": "truncate_product"},
    "rejected": {"anchor": "proximal", "tis_mode": "reject"},
    "turns": {"ratio_unit": "turn"},
    "all tokens": {"aggregation": "token"},
    "constant": {"aggregation": "constant", "aggregation_tokens": 64},
    "grpo": {"ratio_unit": "token", "eps_low": 0.2, "eps_high": 0.27, "dual_clip": 3.0},
    "cispo": {"surrogate": "cispo", "ratio_unit": "token"},
    "sapo": {"surrogate": "sapo", "ratio_unit": "token"},
    "dppo": {"surrogate": "dppo", "ratio_unit": "token"},
    "m2po": {"surrogate": "m2po", "ratio_unit": "token"},
    "m2po_clip": {"surrogate": "m2po_clip", "ratio_unit": "token", "eps_low": 0.3, "eps_high": 0.5},
    "vespo": {"surrogate": "vespo", "ratio_unit": "token"},
    "gmpo": {"surrogate": "gmpo", "ratio_unit": "token", "eps_low": 0.33, "eps_high": 0.49},
    "wider with lag": {"clip_range_growth": 0.5},
    "rate by sample size": {"learning_rate_by_ess": True},
}
PENALTIES: Final = {"keeps_reference": True, "entropy_gradient": True, "load_balance_coefficient": 0.001}
EPISODES: Final = {name: OBJECTIVES[name] for name in ("all tokens", "constant", "rate by sample size")}
HALF: Final = {"dtype": "bfloat16", "activation_checkpointing": True}
CASES: Final = [
    Case("objectives", layers=1, objectives=OBJECTIVES),
    Case("dump", layers=1, batch={"dump": True}, objectives={"default": {}, "proximal": OBJECTIVES["proximal"]}),
    Case("episodes", layers=1, batch={"episodes": True}, objectives={"default": {}} | EPISODES),
    Case("turns' advantages", layers=1, batch={"advantage": "turn", "adaptive": True}),
    Case("teacher", layers=1, engine={"teacher": "a model"}, batch={"teacher_coefficient": 0.5}),
    *(
        case
        for layers in (1, 3)
        for case in (
            Case(
                f"penalties {layers}",
                layers=layers,
                engine=PENALTIES,
                objectives={
                    "loss": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
                    "reward": {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
                },
            ),
            Case(f"replay {layers}", layers=layers, engine={"routing_replay": True}),
            Case(
                f"adapters {layers}",
                layers=layers,
                lora={"rank": 4, "target_modules": ["attention", "experts"]},
                states=layers == 1,
            ),
            Case(f"stage 2 {layers}", layers=layers, learner=HALF | {"zero_stage": 2}),
        )
    ),
    Case("stage 0", layers=1, learner={"zero_stage": 0}, states=True),
    Case("stage 1", layers=1, learner=HALF | {"zero_stage": 1}, states=True),
    Case("colocated", layers=1, engine={"leaves_device": True, "keeps_reference": True}, states=True),
    Case("colocated, half", layers=1, learner=HALF | {"zero_stage": 2}, engine={"leaves_device": True}, states=True),
    # The last one, and without checkpoints of activations: DeepSpeed gives PyTorch a linear layer of its own for it,
    # which saves tensors where no call is seen. In the first batch it finds the order of the layers.
    Case("stage 3", layers=1, learner={"dtype": "bfloat16", "zero_stage": 3}, states=True, warm=True),
]
PER_STEP: Final = {
    "stage 0": 3,
    "stage 1": 5,
    "stage 2 1": 6,
    "stage 2 3": 6,
    "stage 3": 4,
    "colocated": 5,
    "colocated, half": 6,
}
"""Waits of an optimizer step, where they are not 2: DeepSpeed's optimizers read the norm for themselves."""
PER_BATCH: Final = {("dump", "default"): 5, ("dump", "proximal"): 5}
"""Waits of a batch, where they are not 3."""
GLOO: Final = " in deepspeed/comm/torch.py"
"""Stage 3's reduction copies within gloo, as NCCL does not."""

Found = dict[str, dict[str, dict[str, Counts]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return counted(tmp_path_factory.mktemp("waits"), CASES, 900)


ALL: Final = [(case.name, objective) for case in CASES for objective in case.objectives]


@pytest.mark.parametrize(("name", "objective"), ALL)
def test_waits_go_with_steps_and_batches_alone(found: Found, name: str, objective: str) -> None:
    phases = {
        phase: {line: n for line, n in each.items() if GLOO not in line} for phase, each in found[name][objective].items()
    }
    seen = Waits.of(phases)
    assert (seen.per_micro_batch, seen.mixes) == ({}, {})
    penalties = {"loss": 4, "reward": 5}.get(objective, 3)
    wanted = (PER_STEP.get(name, 3 if "rate" in objective else 2), PER_BATCH.get((name, objective), penalties))
    assert (sum(seen.per_step.values()), sum(seen.per_batch.values())) == wanted, seen


@pytest.mark.parametrize("name", ["penalties", "replay", "adapters", "stage 2"])
def test_layers_add_no_wait(found: Found, name: str) -> None:
    one, three = (found[f"{name} {layers}"] for layers in (1, 3))
    for objective in set(one) - {"start", "states", "plants"}:
        assert one[objective] == three[objective]


STATES: Final = [case.name for case in CASES if case.states]


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_saved_loaded_served_and_moved_without_mixing(found: Found, name: str) -> None:
    phases = found[name]["states"]
    assert {phase: set(each) - set(waits(each)) for phase, each in phases.items()} == {phase: set() for phase in phases}
    for phase in phases.keys() & {"trained after load", "trained after return"}:
        assert phases[phase] == found[name]["default"]["batch"]
    for phase in ("save", "load"):
        reads = {line: n for line, n in waits(phases[phase]).items() if "_local_scalar_dense" in line or "tolist" in line}
        assert sum(reads.values()) <= 1, reads
