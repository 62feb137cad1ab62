"""DeepSpeed's engine on one rank and on two, in every ZeRO stage, against plain PyTorch on padded rows.

All numbers are float32 on one thread per process. All assertions share one start of the processes.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gspo.loss import objective_loss
from gspo.mismatch import MismatchTracker, mismatch_moments
from gspo.model.packing import TrainGroup
from gspo.staleness import sequence_lag
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.plan import BatchRows, deal_groups
from gspo_services.shared.settings.sections import Learner, LoraSection, Rollout
from gspo_services.shared.settings.sections.run import require_colocatable
from tests.support.learner.learner_worker import (
    IMMOVABLE,
    MOVABLE,
    NUM_MINI_BATCHES,
    OBJECTIVE,
    SCHEDULED_RATE,
    SETTINGS,
)
from tests.support.learner.ranks import Ranks
from tests.support.learner.training_groups import padded_logprobs, write_model_and_groups

STAGES = (0, 1, 2, 3)
LAYOUTS = [(stage, num_ranks) for stage in STAGES for num_ranks in (1, 2)]


Results = dict[str, dict[int, list[dict[str, Any]]]]
"""By scenario and number of ranks, for every rank."""

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and groups whose behaviour log-probs are its own with engine noise; a teacher of another shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("learner")
    write_model_and_groups(directory)
    vocabulary = json.loads((directory / "model" / "config.json").read_text())["vocab_size"]
    small = Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(5)
    Qwen3ForCausalLM(small).save_pretrained(directory / "teacher")
    return directory


@pytest.fixture(scope="module")
def everything(work: Path) -> Results:
    """Runs of one rank and of two, side by side."""
    scenarios = {
        1: ("stages", "bfloat16", "reference", "leaving", "alone", "prompts"),
        2: ("stages", "replay", "faults", "prompts"),
    }
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                Ranks("tests.support.learner.learner_worker", [str(work), *names], num_ranks, work / "worker")
            )
            for num_ranks, names in scenarios.items()
        ]
        for ranks in started:
            ranks.finish(900)
    found: Results = {}
    for num_ranks, names in scenarios.items():
        for name in names:
            paths = [work / f"{name}-{rank}-of-{num_ranks}.json" for rank in range(num_ranks)]
            found.setdefault(name, {})[num_ranks] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return found


@pytest.fixture(scope="module")
def results(everything: Results) -> dict[int, list[dict[str, Any]]]:
    """The results of all ZeRO stages, by number of ranks, for every rank."""
    return everything["stages"]


@pytest.fixture(scope="module")
def reference(work: Path) -> dict[str, Any]:
    """The same batch with plain PyTorch: padded rows, no micro-batches, AdamW."""
    from transformers import AutoModelForCausalLM

    from tests.support.loss.sequences import load_groups

    groups: list[TrainGroup] = load_groups(work / "groups.npz")
    sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS["learning_rate"], eps=SETTINGS["adam_eps"], weight_decay=SETTINGS["weight_decay"]
    )
    mismatch = MismatchTracker()
    losses, grad_norms, rows = [], [], BatchRows.of(groups)
    for step, chosen in enumerate(deal_groups(groups, 1, NUM_MINI_BATCHES)):
        members = [sequences[row] for row in rows.of_groups(chosen)]
        logprobs_T = torch.cat(padded_logprobs(model, members))
        mask_T, behaviour_T, advantages_T, versions_T = (
            torch.from_numpy(np.concatenate([getattr(sequence, name)[1:] for sequence in members]))
            for name in ("action_mask", "behaviour_logprobs", "advantages", "versions")
        )
        lengths = torch.tensor([sequence.num_tokens - 1 for sequence in members])
        ids_T = torch.repeat_interleave(torch.arange(len(members)), lengths)
        output = objective_loss(
            OBJECTIVE,
            logprobs_T,
            behaviour_T,
            advantages_T,
            mask_T,
            ids_T,
            lag_S=sequence_lag(1, versions_T, mask_T, ids_T, len(members)),
            sigma=mismatch.sigma,
            num_sequences=len(members),
        )
        if step == 0:
            mismatch.update(mismatch_moments(logprobs_T, behaviour_T, mask_T, versions_T, 1))
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS["learning_rate"] * min(1, (step + 1) / SETTINGS["warmup_steps"])
        optimizer.zero_grad()
        output.loss.backward()
        losses.append(float(output.loss.detach()))
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    model.save_pretrained(work / "reference")
    return {
        "loss": sum(losses) / 2,
        "grad_norm": sum(grad_norms) / 2,
        "sigma": mismatch.sigma,
        "before": load_file(work / "model" / "model.safetensors"),
        "weights": load_file(work / "reference" / "model.safetensors"),
    }


@pytest.mark.parametrize(("stage", "num_ranks"), LAYOUTS)
def test_training_equals_plain_pytorch_on_padded_rows(
    work: Path, results: dict[int, list[dict[str, Any]]], reference: dict[str, Any], stage: int, num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        metrics = rank[str(stage)]["metrics"]
        assert metrics["loss"] == pytest.approx(reference["loss"], abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        assert metrics["mismatch_sigma"] == pytest.approx(reference["sigma"], rel=1e-3)
        assert metrics["learning_rate"] == SETTINGS["learning_rate"]
        assert metrics["sequences/all"] == 15
    weights = load_file(work / f"trained-{stage}-{num_ranks}.safetensors")
    assert set(weights) == set(reference["weights"])
    for name, expected in reference["weights"].items():
        change = (expected - reference["before"][name]).norm()
        assert change > 0, name
        assert (weights[name] - expected).norm() <= 2e-3 * change, name


def test_some_ratios_are_clipped_and_two_ranks_report_the_same(results: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (rank["1"]["metrics"] for rank in results[2])
    assert first == second
    assert 0 < first["clip_fraction/all"] < 1


@pytest.mark.parametrize(("stage", "num_ranks"), LAYOUTS)
def test_a_resumed_run_continues_bit_for_bit(
    results: dict[int, list[dict[str, Any]]], reference: dict[str, Any], stage: int, num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        result = rank[str(stage)]
        assert result["resumed"] == result["went_on"]
        assert len({result["untouched"], result["resumed_weights"], result["went_on"]}) == 3
        assert result["batch_position"] == 1
        assert result["next_rates"] == [SCHEDULED_RATE] * 2, "the warm-up of two steps is over"


def test_a_checkpoint_of_another_stage_gives_the_same_weights(results: dict[int, list[dict[str, Any]]]) -> None:
    for rank in (*results[1], *results[2]):
        assert rank["other_stage"] == rank["1"]["resumed_weights"]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_export_loads_in_transformers_bit_for_bit(
    work: Path, results: dict[int, list[dict[str, Any]]], stage: int, num_ranks: int
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = work / f"export-{stage}-{num_ranks}"
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == torch.float32
    AutoTokenizer.from_pretrained(directory)
    model.save_pretrained(work / f"again-{stage}-{num_ranks}")
    again = load_file(work / f"again-{stage}-{num_ranks}" / "model.safetensors")
    served = load_file(work / f"exported-{stage}-{num_ranks}.safetensors")
    assert set(again) == set(served)
    assert all(torch.equal(again[name], served[name]) for name in served)


def test_an_engine_that_leaves_its_device_between_batches_trains_as_one_that_stays(everything: Results) -> None:
    (result,) = everything["leaving"][1]
    assert set(result["digests"]) == set(MOVABLE)
    assert all(stays == leaves for stays, leaves in result["digests"].values())
    assert set(map(tuple, result["where"].values())) == {("cpu",)}


@pytest.mark.parametrize("max_grad_norm", ["0.0", "0.001", "1000.0"])
def test_one_rank_without_zero_inside_trains_as_deepspeeds_zero_1_to_the_bit(
    everything: Results, max_grad_norm: str
) -> None:
    """Weights, losses and gradient norms, clipped and not, with all weights and with adapters; and checkpoints of both."""
    (results,) = everything["alone"][1]
    found = results[max_grad_norm]
    assert found["inside"] == ["AdamW", "DeepSpeedZeroOptimizer"]
    without, with_zero = found["metrics"]
    assert without == with_zero
    norms = [batch["grad_norm"] for batch in without]
    assert min(norms) > 0.001
    assert len(set(norms)) == 2
    assert len(set(found["digests"])) == 1


def test_deepspeed_moves_the_states_of_no_stage_that_run_colocate_refuses(everything: Results) -> None:
    (result,) = everything["leaving"][1]
    assert set(result["refused"]) == set(IMMOVABLE)
    for name, changes in IMMOVABLE.items():
        with pytest.raises(ValueError, match=r"use learner\.zero_stage = 2"):
            require_colocatable(Learner(**changes), Rollout(num_servers=1), LoraSection())
        assert result["refused"][name]
    for changes in MOVABLE.values():
        learner = {key: value for key, value in changes.items() if key in Learner.model_fields}
        require_colocatable(Learner(**learner), Rollout(num_servers=1), LoraSection())


def test_bfloat16_training_moves_every_tensor(work: Path, everything: Results) -> None:
    (result,) = everything["bfloat16"][1]
    assert math.isfinite(result["metrics"]["grad_norm"])
    before = load_file(work / "model" / "model.safetensors")
    after = load_file(work / "bfloat16.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    moved = [name for name in before if not torch.equal(after[name], before[name].bfloat16())]
    assert len(moved) == len(before)
    # The host reads values of the device once a step, not once a micro-batch.
    (many, reads_of_many), (one, reads_of_one) = ((int(key), value) for key, value in result["reads"].items())
    assert many >= 4 > one == 2, "one of them has no gradient"
    assert reads_of_many == reads_of_one > 0
    profile = result["profiles"][0]
    seconds = profile["seconds"]
    assert all(seconds[phase] > 0 for phase in ("prepare", "first_pass", "forward", "loss", "backward", "optimizer"))
    assert sum(seconds.values()) == pytest.approx(profile["total_s"])
    assert profile["tokens"] == profile["rank_tokens"][0] == result["metrics"]["packed_tokens"]


@pytest.fixture(scope="module")
def replay(everything: Results) -> list[dict[str, Any]]:
    """The results of both ranks."""
    return everything["replay"][2]


def test_routing_replay_keeps_the_experts_of_two_ranks_and_trains_the_routers(
    work: Path, replay: list[dict[str, Any]]
) -> None:
    first, second = replay
    assert first == second
    assert first["free"]["metrics"]["experts_changed/all"] > 0
    for name in ("replayed-1", "replayed-3", "replayed-shared", "unchanged"):
        assert first[name]["metrics"]["experts_changed/all"] == 0
    assert first["replayed-1"]["metrics"]["ratio_max/all"] > 1
    assert first["unchanged"]["metrics"]["ratio_max/all"] == first["unchanged"]["metrics"]["ratio_min/all"] == 1
    assert first["reported"]["metrics"]["experts_replayed/all"] == 1
    assert first["reported"]["metrics"]["experts_differ/all"] == 0
    assert first["reported"]["metrics"]["ratio_max/all"] > 1
    before, free, replayed, partitioned, shared = (
        load_file(work / path)
        for path in (
            "model/model.safetensors",
            "free.safetensors",
            "replayed-1.safetensors",
            "replayed-3.safetensors",
            "replayed-shared.safetensors",
        )
    )
    for name, tensor in before.items():
        change = (replayed[name] - tensor).norm()
        assert change > 0, name
        # Without replay some micro-batch of the second step had other experts.
        assert not torch.equal(replayed[name], free[name]), name
        assert (partitioned[name] - replayed[name]).norm() <= 2e-3 * change, name
        assert (shared[name] - replayed[name]).norm() <= 2e-3 * change, name
    assert "a qwen3 model has no routers" in first["dense"]


def test_two_ranks_agree_on_the_scale_of_an_adaptive_clip(replay: list[dict[str, Any]]) -> None:
    first, second = replay
    assert first["free"]["scale"] == second["free"]["scale"] != 1


def test_the_reference_is_the_start_model_whatever_was_trained(everything: Results) -> None:
    """In ZeRO 1, where the policy is whole, its first log-probs are the reference's to the bit."""
    (results,) = everything["reference"][1]
    for stage in ("1", "3"):
        before, after = results[stage]["before"], results[stage]["after"]
        assert before["reference"] == pytest.approx(before["own"], abs=1e-6)
        assert after["reference"] == before["reference"]
        assert max(abs(x - y) for x, y in zip(after["own"], before["own"], strict=True)) > 1e-3
        assert results[stage]["metrics"]["reference_kl/all"] > 1e-8
        assert 0.0019 < results[stage]["metrics"]["load_balancing_loss"] < 0.004  # between 2 and 4, times 0.001
        assert results[stage]["float32_heads"] == [stage == "3"] * 2
    assert results["1"]["before"]["reference"] == results["1"]["before"]["own"]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("experts", ["free", "replayed"])
def test_a_prompt_that_is_computed_once_for_its_group_changes_nothing(
    everything: Results, num_ranks: int, experts: str
) -> None:
    for results in everything["prompts"][num_ranks]:
        whole, shared = (dict(results[f"{experts}, {shares}"]) for shares in (False, True))
        assert whole.pop("computed_tokens") == whole["packed_tokens"]
        # Two ranks have parts of the same groups.
        assert shared.pop("computed_tokens") < (0.8 if num_ranks == 1 else 0.95) * shared["packed_tokens"]
        assert shared == pytest.approx(whole, rel=1e-3, abs=1e-5)


def test_a_teacher_of_another_shape_scores_the_policys_tokens_and_stays_as_it_is(everything: Results, work: Path) -> None:
    from transformers import Qwen3ForCausalLM

    from tests.support.loss.sequences import load_groups

    sequences, _ = sequences_with_advantages(load_groups(work / "groups.npz"), AdvantageSettings())
    teacher = Qwen3ForCausalLM.from_pretrained(work / "teacher", dtype=torch.float32)
    expected = [logprobs_T.detach() for logprobs_T in padded_logprobs(teacher, sequences)]
    kls = []
    for sequence, logprobs_T in zip(sequences, expected, strict=True):
        mask_T, behaviour_T = torch.from_numpy(sequence.action_mask[1:]), torch.from_numpy(sequence.behaviour_logprobs[1:])
        kls.append((behaviour_T - logprobs_T)[mask_T].mean().item())
    (results,) = everything["reference"][1]
    for stage in ("1", "3"):
        before, after = results[stage]["before"], results[stage]["after"]
        # The last index of a packed sequence has no target, and only actions are scored.
        parts = torch.tensor(before["teacher"]).split([sequence.num_tokens for sequence in sequences])
        scored = torch.cat([part[:-1] for part in parts])
        mask = torch.cat([torch.from_numpy(sequence.action_mask[1:]) for sequence in sequences])
        assert scored.tolist() == pytest.approx(torch.where(mask, torch.cat(expected), 0.0).tolist(), abs=1e-5)
        assert after["teacher"] == before["teacher"]
        assert results[stage]["metrics"]["teacher_kl/all"] == pytest.approx(np.mean(kls), rel=1e-4)


def test_a_step_that_must_not_be_made_is_refused_on_every_rank_and_changes_nothing(everything: Results) -> None:
    for rank in everything["faults"][2]:
        assert rank["frozen"]["message"].startswith("MissingGradientError: 1 of 25 parameters got no gradient: ")
        assert "model.layers.1.mlp.gate.weight" in rank["frozen"]["message"]
        assert rank["nan_loss"]["message"].startswith("NonFiniteLossError: the loss over all ranks is nan")
        assert rank["nan_gradient"]["message"].startswith("NonFiniteGradientError: ")
        assert rank["nan_model"]["message"].startswith("NonFiniteLossError: ")
        assert rank["sound"]["message"] == ""
        assert not rank["sound"]["untouched"]
        for fault in ("frozen", "nan_loss", "nan_gradient"):
            assert rank[fault]["untouched"], fault


def test_a_factor_of_the_learning_rate_holds_for_one_step(everything: Results) -> None:
    for rank in everything["faults"][2]:
        assert rank["rates"] == [{"learning_rates": [0.0, 0.02], "moved": [False, True]}] * 2
