"""What ranks say to each other, and the least time of a step."""

from typing import Any

import pytest

from gspo_services.shared.estimates import Device, device_named, roofline, shape_of, traffic_of, work_of
from gspo_services.shared.settings import Settings
from tests.support.checking.shapes import QWEN3_8B, QWEN3_30B

TOKENS = 16_384


def given(**learner: Any) -> Settings:
    section = {"num_ranks": 8, "dtype": "bfloat16", "activation_checkpointing": True, "zero_stage": 3}
    return Settings.model_validate({"learner": section | {"max_tokens_per_micro_batch": TOKENS} | learner})


@pytest.mark.parametrize(
    ("stage", "dtype", "ring", "of_step"),
    [(3, "bfloat16", 6, 0), (2, "bfloat16", 4, 2), (1, "bfloat16", 0, 6), (0, "float32", 0, 8)],
)
def test_what_a_stage_sends_of_each_parameter(stage: int, dtype: str, ring: float, of_step: float) -> None:
    shape = shape_of(QWEN3_8B)
    found = traffic_of(shape, given(zero_stage=stage, dtype=dtype), TOKENS)
    assert found.ring == pytest.approx(ring * shape.parameters * 7 / 8)
    assert found.ring_of_step == pytest.approx(of_step * shape.parameters * 7 / 8)
    assert found.exchanged == 0


def test_experts_that_all_ranks_share_are_not_gathered_and_their_tokens_travel() -> None:
    shape = shape_of(QWEN3_30B)
    found = traffic_of(shape, given(expert_parallel=8), TOKENS)
    assert found.ring == pytest.approx(6 * shape.other_parameters * 7 / 8)
    # There and back, forward, again, and backward, in 48 layers: rows of 2,048 values in bfloat16 for 8 experts.
    assert found.exchanged == pytest.approx(6 * 48 * TOKENS * 8 * 2048 * 2 * 7 / 8)
    half = traffic_of(shape, given(expert_parallel=4), TOKENS)
    assert half.ring == pytest.approx(6 * (shape.other_parameters * 7 / 8 + shape.expert_parameters / 4 / 2))


def test_ranks_that_share_rows_exchange_heads_of_which_each_has_one_key() -> None:
    found = traffic_of(shape_of(QWEN3_30B), given(sequence_parallel=8), TOKENS)
    assert found.exchanged == pytest.approx(3 * 48 * TOKENS * (2 * 32 + 2 * 8) * 128 * 2 * 7 / 8)


def test_the_least_time_follows_from_published_rates_and_says_what_bounds_it() -> None:
    h100, shape = device_named("H100"), shape_of(QWEN3_30B)
    assert h100 is not None
    settings = given()
    work = work_of(settings, 200)
    least = roofline(shape, settings, work, h100)
    assert least is not None
    assert least.ring == pytest.approx(6 * shape.parameters * 7 / 8 / 450e9)
    assert least.bound == "operations"
    assert least.tokens_per_s == pytest.approx(TOKENS / least.operations)
    # Training is three quarters of what checkpointing computes.
    assert least.useful == pytest.approx(0.75 * least.operations)
    assert least.mfu == pytest.approx(0.75)
    far = given(num_ranks=2, num_nodes=4, rendezvous_address="127.0.0.1:1")
    slower = roofline(shape, far, work, h100)
    assert slower is not None
    assert slower.ring == pytest.approx(least.ring * 450 / 100), "two cards a machine"
    assert slower.bound == "weights and gradients"
    assert slower.mfu == pytest.approx(slower.useful / slower.ring)
    shared = roofline(shape, given(expert_parallel=8), work, h100)
    assert shared is not None
    assert shared.seconds == shared.operations + shared.exchanged
    assert least.of_step == pytest.approx(30 * shape.parameters / 8 / 3.35e12)


def test_nothing_is_said_of_a_device_of_unknown_links() -> None:
    settings = given()
    device = Device(name="x", memory_bytes=1e9, bandwidth=1e12, peak=1e14)
    assert roofline(shape_of(QWEN3_8B), settings, work_of(settings, 200), device) is None
