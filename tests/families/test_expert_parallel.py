"""Families whose experts ranks can share: on 2 and 4 ranks they learn what one rank learns, and serve what it serves.

They also replay what was recorded, and no other expert.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.moe.mixture import mixture_of
from gspo_services.learner.start import AUTOEP_FAMILIES
from tests.support.learner.parallel_jobs import Results, gradient_job, job, require_gradients, run_jobs, state
from tests.support.learner.training_groups import write_model_and_groups
from tests.support.policy.families import family_config, save_family

pytestmark = [pytest.mark.families, pytest.mark.timeout(1200)]
KINDS = sorted(AUTOEP_FAMILIES)
TOLERANCE = 1e-4
REPLAY = {"routing_replay": True, "max_grad_norm": 0.0}
REPORTED = {**REPLAY, "replays_engine": True, "reported": "own", "steps": 2}
EXCHANGES = 5
"""Of a layer with experts in a micro-batch: how many tokens each rank sends, the tokens, and what the experts make of them;
in backward the last two again."""
BALANCED = {"load_balance_coefficient": 0.5, "zero_stage": 1}
LOSS_KINDS = ["glm4_moe", "qwen3_moe"]
BIASED = {"expert_bias_rate": 0.01, "export": True}
BIAS_KINDS = ["deepseek_v3", "minimax_m2"]
"""With the bias in the router, and beside it."""
SLOW = "gpt_oss"
"""Its experts are not DeepSpeed's."""
STILL = {"dtype": "bfloat16", "learning_rate": 1e-30, "save_after": 1, "export": True}
"""A step too small to move anything."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    write_model_and_groups(directory)
    for kind in KINDS:
        save_family(directory / kind, kind)
    return directory


@pytest.fixture(scope="module")
def plain(work: Path) -> Results:
    jobs = []
    for kind in KINDS:
        jobs += [
            gradient_job(f"{kind}-1", model=kind, zero_stage=0, export=True),
            job(f"{kind}-given-1", model=kind, zero_stage=0, replay=True, **REPLAY),
            job(f"{kind}-still-1", model=kind, zero_stage=1, **STILL),
        ]
    jobs += [job(f"{kind}-biased-1", model=kind, zero_stage=1, steps=2, save_after=1, **BIASED) for kind in BIAS_KINDS]
    return run_jobs(work, 1, jobs)


@pytest.fixture(scope="module")
def two(work: Path, plain: Results) -> Results:
    """Two ranks, after the one, whose runs they continue."""
    jobs = []
    for kind in KINDS:
        jobs += [
            gradient_job(f"{kind}-2", model=kind, zero_stage=1, expert_parallel=2, export=True),
            job(f"{kind}-given-2", model=kind, zero_stage=1, expert_parallel=2, replay=True, **REPLAY),
            job(f"{kind}-still-2", model=kind, zero_stage=2, expert_parallel=2, **STILL),
            job(f"{kind}-reported-2", model=kind, zero_stage=2, expert_parallel=2, **REPORTED),
            job(f"{kind}-untrained", model=kind, zero_stage=3, expert_parallel=2, steps=0, export=True),
            job(f"{kind}-resumed", model=kind, zero_stage=3, expert_parallel=2, resume=f"{kind}-1", steps=0, export=True),
        ]
    for kind in LOSS_KINDS:
        jobs += [gradient_job(f"{kind}-balanced-{n}", model=kind, expert_parallel=n, **BALANCED) for n in (1, 2)]
    jobs.append(gradient_job("slow", model=SLOW, zero_stage=1, expert_parallel=2, router_rate_factor=0.25))
    for kind in BIAS_KINDS:
        jobs += [
            job(f"{kind}-biased-2", model=kind, zero_stage=2, expert_parallel=2, steps=2, **BIASED),
            job(f"{kind}-biased-on", model=kind, zero_stage=3, expert_parallel=2, resume=f"{kind}-biased-1", **BIASED),
        ]
    return run_jobs(work, 2, jobs)


@pytest.fixture(scope="module")
def four(work: Path) -> Results:
    return run_jobs(work, 4, [gradient_job(f"{kind}-4", model=kind, zero_stage=2, expert_parallel=4) for kind in KINDS])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_experts_have_the_loss_and_gradients_of_one(
    kind: str, work: Path, plain: Results, two: Results, four: Results
) -> None:
    (loss,) = plain[0][f"{kind}-1"]["losses"]
    number = sum(key.endswith("/exp_avg") for key in state(work, f"{kind}-1"))
    for name, results in ((f"{kind}-2", two), (f"{kind}-4", four)):
        assert results[0][name]["losses"] == pytest.approx([loss], rel=1e-6, abs=1e-6)
        assert results[0][name]["experts"] == plain[0][f"{kind}-1"]["experts"]
        require_gradients(work, name, f"{kind}-1", tolerance=TOLERANCE, num_parameters=number)


@pytest.mark.parametrize("kind", KINDS)
def test_given_experts_are_used_with_the_routers_weights(kind: str, work: Path, plain: Results, two: Results) -> None:
    (loss,) = plain[0][f"{kind}-given-1"]["losses"]
    assert two[0][f"{kind}-given-2"]["losses"] == pytest.approx([loss], rel=1e-6, abs=1e-6)
    number = sum(key.endswith("/exp_avg") for key in state(work, f"{kind}-given-1"))
    require_gradients(work, f"{kind}-given-2", f"{kind}-given-1", tolerance=TOLERANCE, num_parameters=number)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_exchanged_as_often_as_their_layers_need(kind: str, plain: Results, two: Results) -> None:
    config = family_config(kind)
    layers = config["num_hidden_layers"] - len(mixture_of(config).dense_layers)
    for rank in two:
        assert [each["exchanges"] for each in rank[f"{kind}-given-2"]["replays"]] == [EXCHANGES * layers] * 2
    assert [each["exchanges"] for each in plain[0][f"{kind}-given-1"]["replays"]] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_experts_swapped_in_what_is_replayed_are_found(kind: str, plain: Results, two: Results) -> None:
    for rank in (plain[0][f"{kind}-given-1"], *(each[f"{kind}-given-2"] for each in two)):
        right, swapped = rank["replays"]
        assert right["misplaced"] == 0 < swapped["misplaced"]
    for rank in two:
        right, swapped = rank[f"{kind}-reported-2"]["experts_of_steps"]
        assert right["experts_replayed/all"] == swapped["experts_replayed/all"] == 1
        assert right["experts_differ/all"] == 0
        assert swapped["experts_differ/all"] > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_serve_and_export_has_the_names_and_bits_of_the_published_files(
    kind: str, work: Path, plain: Results, two: Results
) -> None:
    original, served = load_file(work / kind / "model.safetensors"), load_file(work / f"{kind}-untrained.safetensors")
    assert set(served) == set(original)
    assert all(torch.equal(served[name], original[name]) for name in original)
    trained, resumed = (load_file(work / f"{kind}-{name}.safetensors") for name in ("1", "resumed"))
    assert set(trained) == set(resumed) == set(original)
    assert all(torch.equal(resumed[name], trained[name]) for name in trained), "a run continues in another layout"
    assert not all(torch.equal(trained[name], original[name]) for name in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_spread_alike_in_each_layout_and_round_to_the_policy(
    kind: str, work: Path, plain: Results, two: Results
) -> None:
    one, shared = state(work, f"{kind}-still-1"), state(work, f"{kind}-still-2")
    for key in (key for key in one if key.endswith("/weight")):
        masters = one[key]
        assert torch.equal(masters, shared[key]), key
        # A bias that no gradient moves stays as it is, in float32.
        is_still = key.endswith("e_score_correction_bias/weight")
        assert is_still or ((masters != masters.bfloat16().float()) | (masters == 0)).float().mean() > 0.9, key
    original, served = load_file(work / kind / "model.safetensors"), load_file(work / f"{kind}-still-2.safetensors")
    assert all(torch.equal(served[name].bfloat16(), original[name].bfloat16()) for name in original)
    assert plain[0][f"{kind}-still-1"]["digest"] == two[0][f"{kind}-still-2"]["digest"]


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_a_loss_that_balances_experts_is_the_same_where_ranks_share_them(kind: str, work: Path, two: Results) -> None:
    """Compared on as many ranks: it depends on what is in a micro-batch."""
    whole, shared, without = (two[0][f"{kind}-{name}"] for name in ("balanced-1", "balanced-2", "2"))
    assert shared["losses"] == pytest.approx(whole["losses"], rel=1e-6, abs=1e-6)
    assert shared["losses"][0] > without["losses"][0] + 0.5
    number = sum(key.endswith("/exp_avg") for key in state(work, f"{kind}-1"))
    require_gradients(work, f"{kind}-balanced-2", f"{kind}-balanced-1", tolerance=TOLERANCE, num_parameters=number)


@pytest.mark.parametrize("kind", BIAS_KINDS)
def test_biases_move_against_the_load_alike_in_every_layout_and_after_a_resume(
    kind: str, work: Path, plain: Results, two: Results
) -> None:
    names = ("1", "2", "on")
    before, *after = (load_file(path) for path in (work / kind / "model.safetensors",
                      *(work / f"{kind}-biased-{name}.safetensors" for name in names)))  # fmt: skip
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        steps = (after[0][name] - before[name]) / BIASED["expert_bias_rate"]
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
        assert set(steps.round().tolist()) <= {-2, -1, 0, 1, 2}
        assert {-2, 2} & set(steps.round().tolist())
        assert all(torch.equal(other[name], after[0][name]) for other in after[1:])


def test_routers_alone_move_by_their_factor(work: Path, two: Results) -> None:
    start = dict(AutoModelForCausalLM.from_pretrained(work / SLOW).named_parameters())
    slow, fast = state(work, "slow"), state(work, f"{SLOW}-2")
    assert two[0]["slow"]["losses"] == two[0][f"{SLOW}-2"]["losses"]
    for name in ("router.weight", "router.bias", "experts.gate_up_proj_bias", "experts.down_proj", "experts.down_proj_bias"):
        key = f"model.layers.0.mlp.{name}"
        factor = 0.25 if name.startswith("router") else 1.0
        change = factor * (fast[f"{key}/weight"] - start[key].detach())
        assert change.norm() > 1e-6, name
        assert (slow[f"{key}/weight"] - start[key].detach() - change).norm() <= 1e-3 * change.norm(), name
