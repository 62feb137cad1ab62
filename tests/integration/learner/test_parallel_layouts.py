"""Expert parallelism, and checkpoints resumed in another layout: two ranks and one. ``tests/ranks`` has four.

Tests of two ranks take a minute of two cores and run with those of four, tests of one rank by default.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from gspo_services.rollout.sglang.client import Engine
from tests.integration.conftest import SglangServer
from tests.support.engines.agreement import TOLERANCE as SERVED_TOLERANCE
from tests.support.engines.agreement import load
from tests.support.engines.prompt_logprobs import prompt_logprobs
from tests.support.learner.parallel_jobs import (
    RESUMED_STEPS,
    Results,
    gradient_job,
    job,
    require_gradients,
    require_same_future,
    require_weights,
    run_jobs,
    state,
)
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe
from tests.support.learner.training_groups import write_model_and_groups

ONE_STEP = {"steps": 1, "save_after": 1}
MOVED = ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight", "model.layers.1.self_attn.q_proj.weight")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeForCausalLM

    directory = tmp_path_factory.mktemp("layouts")
    write_model_and_groups(directory)
    narrower = tiny_qwen3_moe().config
    narrower.moe_intermediate_size //= 2
    Qwen3MoeForCausalLM(narrower).save_pretrained(directory / "narrower")
    return directory


@pytest.fixture(scope="module")
def two(work: Path) -> Results:
    """Two ranks that share the experts."""
    return run_jobs(
        work,
        2,
        [
            gradient_job("gradient", zero_stage=3, expert_parallel=2),
            gradient_job("shared", zero_stage=3, expert_parallel=2, sequence_parallel=2, activation_checkpointing=True),
            gradient_job("offloaded", zero_stage=3, expert_parallel=2, offload="optimizer_and_parameters"),
            job("untrained", zero_stage=3, expert_parallel=2, steps=0, export=True),
            job(
                "run",
                zero_stage=3,
                expert_parallel=2,
                steps=2 + RESUMED_STEPS,
                save_after=2,
                export=True,
                in_background=True,
                # Room for some parameters; the others are written at once.
                checkpoint_copy_gib=2e-4,
            ),
            gradient_job("slow-routers", zero_stage=3, expert_parallel=2, router_rate_factor=0.25),
            job("unwritable", zero_stage=3, expert_parallel=2, save_after=1, unwritable_on=1, in_background=True),
            job("other-size", zero_stage=1, expert_parallel=1, resume="run", steps=RESUMED_STEPS, export=True),
        ],
    )


@pytest.fixture(scope="module")
def after(work: Path, two: Results) -> Results:
    """One rank, after the two."""
    return run_jobs(
        work,
        1,
        [
            gradient_job("single", zero_stage=0),
            job("resumed", zero_stage=3, resume="run", steps=RESUMED_STEPS, export=True),
            job("in-host-memory", zero_stage=2, offload="optimizer", resume="run", steps=RESUMED_STEPS, export=True),
            job("back", zero_stage=3, resume="offloaded", steps=0),
        ],
    )


@pytest.fixture(scope="module")
def one(work: Path) -> Results:
    """One rank."""
    return run_jobs(
        work,
        1,
        [
            job("alone", zero_stage=3, steps=3, save_after=2),
            job("faster", zero_stage=1, resume="alone", learning_rate=0.5, warmup_steps=0, weight_decay=0.0),
            job("lower", zero_stage=1, resume="alone", dtype="bfloat16"),
            job("other-model", zero_stage=3, model="narrower", resume="alone"),
            job("half-1", zero_stage=1, dtype="bfloat16", save_after=1),
            job("half-3", zero_stage=3, dtype="bfloat16", resume="half-1"),
            job("half-3-first", zero_stage=3, dtype="bfloat16"),
            job("half-middle", zero_stage=1, dtype="bfloat16", spread_masters=False, steps=1),
            gradient_job("rate", zero_stage=1, warmup_steps=0),
            *(
                job(f"routers-{stage}", zero_stage=stage, warmup_steps=0, max_grad_norm=0.0, router_rate_factor=0.25, **more)
                for stage, more in ((0, ONE_STEP), (1, ONE_STEP), (3, {"steps": 3, "save_after": 1}))
            ),
            job("routers-on", zero_stage=2, resume="routers-3", steps=2, router_rate_factor=0.25, max_grad_norm=0.0),
            job(
                "routers-stay",
                zero_stage=1,
                dtype="bfloat16",
                spread_masters=False,
                warmup_steps=0,
                router_rate_factor=0.0,
                **ONE_STEP,
            ),
            job("routers-move", zero_stage=1, dtype="bfloat16", resume="routers-stay", router_rate_factor=2.0),
        ],
    )


@pytest.mark.ranks
def test_two_ranks_that_share_the_experts_have_the_loss_and_gradients_of_one(
    work: Path, after: Results, two: Results
) -> None:
    assert two[0]["gradient"] == two[1]["gradient"]
    assert two[0]["gradient"]["losses"] == pytest.approx(after[0]["single"]["losses"], rel=1e-5)
    assert two[0]["gradient"]["norms"] == pytest.approx(after[0]["single"]["norms"], rel=1e-5)
    assert two[0]["gradient"]["experts"] == after[0]["single"]["experts"] != {}
    require_gradients(work, "gradient", "single")


@pytest.mark.ranks
def test_routers_have_their_factor_where_two_ranks_share_the_experts(work: Path, after: Results, two: Results) -> None:
    assert two[0]["slow-routers"]["losses"] == two[0]["gradient"]["losses"]
    require_moved(work, "slow-routers", "single", 0.25)


@pytest.mark.ranks
def test_two_ranks_that_share_each_sequence_have_the_gradients_of_one(work: Path, after: Results, two: Results) -> None:
    assert two[0]["shared"]["losses"] == pytest.approx(after[0]["single"]["losses"], rel=1e-5)
    assert two[0]["shared"]["experts"] == after[0]["single"]["experts"]
    require_gradients(work, "shared", "single")


@pytest.mark.ranks
def test_an_export_of_shared_experts_is_bit_for_bit_what_save_pretrained_writes(work: Path, two: Results) -> None:
    from transformers import AutoModelForCausalLM

    original, served = load_file(work / "model" / "model.safetensors"), load_file(work / "untrained.safetensors")
    assert set(original) == set(served)
    assert all(torch.equal(served[name], original[name]) for name in original)
    model = AutoModelForCausalLM.from_pretrained(work / "run-export", dtype="auto")
    model.save_pretrained(work / "again")
    again, trained = load_file(work / "again" / "model.safetensors"), load_file(work / "run.safetensors")
    assert set(again) == set(trained)
    assert all(torch.equal(again[name], trained[name]) for name in trained)
    assert all(not torch.equal(trained[name], original[name]) for name in trained)


@pytest_asyncio.fixture
async def sglang(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client of a server whose model has these shapes; afterwards its base checkpoint is version 0 again."""
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as client:
        yield client
        await load(client, sglang_server.base, 0)


@pytest.mark.ranks
async def test_sglang_serves_the_weights_of_ranks_that_share_the_experts(work: Path, two: Results, sglang: Engine) -> None:
    await load(sglang, work / "run-export", 1)
    largest, moved = 0.0, 0.0
    assert two[0]["run"]["scored"] == two[1]["run"]["scored"]
    for (token_ids, logprobs), (_, before) in zip(two[0]["run"]["scored"], two[0]["untrained"]["scored"], strict=True):
        # SGLang misreports the last id of a vocabulary in a prompt.
        if TINY_VOCAB_SIZE - 1 not in token_ids:
            served = await prompt_logprobs(sglang.url, token_ids)
            largest = max(largest, float(np.abs(served - logprobs).max()))
            moved = max(moved, float(np.abs(served - before).max()))
    assert largest <= SERVED_TOLERANCE
    assert moved > 1000 * SERVED_TOLERANCE, "the untrained weights would have passed"


@pytest.mark.ranks
def test_a_run_of_two_ranks_with_shared_experts_continues_on_one(work: Path, after: Results, two: Results) -> None:
    require_same_future(after[0]["resumed"], two[0]["run"], RESUMED_STEPS)
    require_weights(work, "resumed", "run")


@pytest.mark.ranks
def test_offload_to_host_memory_changes_no_gradient(work: Path, after: Results, two: Results) -> None:
    assert two[1]["offloaded"]["offloaded"] == [True, True]
    assert two[1]["gradient"]["offloaded"] == [False, False]
    assert two[0]["offloaded"]["norms"] == pytest.approx(after[0]["single"]["norms"], rel=1e-5)
    require_gradients(work, "offloaded", "single")


@pytest.mark.ranks
def test_a_run_continues_with_its_optimizer_in_host_memory_and_back(work: Path, after: Results, two: Results) -> None:
    assert after[0]["in-host-memory"]["offloaded"] == [True, False]
    require_same_future(after[0]["in-host-memory"], two[0]["run"], RESUMED_STEPS)
    require_weights(work, "in-host-memory", "run")
    assert after[0]["back"]["digest"] == two[0]["offloaded"]["digest"]


@pytest.mark.ranks
def test_a_run_continues_in_another_stage_with_all_experts_on_every_rank(work: Path, two: Results) -> None:
    require_same_future(two[0]["other-size"], two[0]["run"], RESUMED_STEPS)
    require_weights(work, "other-size", "run")


@pytest.mark.ranks
def test_a_rank_that_cannot_write_ends_saving_on_all_ranks_and_leaves_nothing(work: Path, two: Results) -> None:
    first, second = (rank["unwritable"] for rank in two)
    assert "cannot be written: another rank could not write its part" in first["error"]
    assert "safetensors" in second["error"]
    assert "File too large" in second["error"]
    # The ranks are still in step: the digest is a collective.
    assert first["digest"] == second["digest"]
    assert list((work / "unwritable").iterdir()) == []


def test_the_learning_rate_comes_from_the_configuration_not_from_the_checkpoint(one: Results) -> None:
    assert one[0]["faster"]["rates"] == [0.5]
    assert one[0]["alone"]["rates"] == [0.001, 0.002, 0.002]


def require_moved(work: Path, name: str, reference: str, factor: float) -> None:
    """Routers moved from the start model by ``factor`` times what they did in ``reference``, other weights alike."""
    start, found, expected = load_file(work / "model" / "model.safetensors"), state(work, name), state(work, reference)
    for weight in MOVED:
        change = (expected[f"{weight}/weight"] - start[weight]) * (factor if ".gate." in weight else 1.0)
        assert change.norm() > 1e-4, weight
        assert (found[f"{weight}/weight"] - start[weight] - change).norm() < 1e-3 * change.norm(), (name, weight)


def test_routers_move_by_their_factor_in_every_stage_and_other_weights_as_without(work: Path, one: Results) -> None:
    for stage in (0, 1, 3):
        require_moved(work, f"routers-{stage}", "rate", 0.25)
        assert one[0][f"routers-{stage}"]["rates"][0] == 0.002, "the rate of all other weights"
        assert one[0][f"routers-{stage}"]["norms"][0] == pytest.approx(one[0]["rate"]["norms"][0], rel=1e-5)


def test_a_run_with_slow_routers_continues_in_another_stage(one: Results) -> None:
    require_same_future(one[0]["routers-on"], one[0]["routers-3"], 2)


def test_routers_at_rate_0_keep_every_bit_and_may_move_when_the_run_continues(work: Path, one: Results) -> None:
    found = state(work, "routers-stay")
    for name, start in load_file(work / "model" / "model.safetensors").items():
        if f"{name}/weight" in found:
            assert torch.equal(found[f"{name}/weight"], start.bfloat16().float()) == (".mlp.gate." in name), name
    assert "losses" in one[0]["routers-move"]
    assert one[0]["routers-move"]["digest"] != one[0]["routers-stay"]["digest"]


def test_in_bfloat16_zero_3_computes_the_same_as_zero_1(one: Results) -> None:
    # When ZeRO-3 rounded the rotary frequencies, this loss moved by a seventh.
    assert one[0]["half-3-first"]["losses"] == one[0]["half-1"]["losses"]
    assert "losses" in one[0]["half-3"]


def test_spread_masters_are_the_same_policy_until_the_first_step(one: Results) -> None:
    assert one[0]["half-middle"]["losses"] == one[0]["half-1"]["losses"][:1]
    assert one[0]["half-middle"]["digest"] != one[0]["half-1"]["digest"]


def test_a_checkpoint_of_another_model_is_refused_with_both_names(one: Results) -> None:
    saved = one[0]["alone"]["layout"]["parameters"]
    error = one[0]["other-model"]["error"]
    assert f"was saved with parameters = {saved}, this learner has " in error
    assert error.endswith("; use the same")


def test_a_checkpoint_of_another_type_is_refused_with_both_types(one: Results) -> None:
    assert "was saved with dtype = float32, this learner has bfloat16; use the same" in one[0]["lower"]["error"]
