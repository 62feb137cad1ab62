"""Speed and versions: what was measured lies inside, and more of what helps helps."""

from typing import Any

import pytest

from gspo_services.shared.estimates import Hardware, RunPace, Span, device_named, pace_of, shape_of, version_span, work_of
from gspo_services.shared.settings import Settings
from tests.support.checking.shapes import QWEN3_8B, QWEN3_30B, TINY

TWO_CORES = Hardware(device=None, cores=2)
MEDIUM: dict[str, Any] = TINY | {
    "model_type": "qwen3", "num_experts": 0, "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768,
    "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(sections)


def on_h100s(config: dict[str, Any], given: Settings, number: int = 8, rollouts: int = 4) -> RunPace:
    hardware = Hardware(device=device_named("H100"), num_devices=number, cores=16, is_named=True)
    pace = pace_of(shape_of(config), given, hardware, work_of(given, 200), rollouts)
    assert pace is not None
    return pace


DEMO = settings(
    sampling={"max_turn_tokens": 8, "max_tokens": 64},
    batch={"group_size": 8, "groups_per_batch": 32},
    rollout={"num_servers": 2, "max_running": 64, "max_total_tokens": 16384},
)
GPU = settings(
    model={"dtype": "bfloat16"},
    sampling={"max_turn_tokens": 2048, "max_tokens": 3072},
    batch={"groups_per_batch": 64},
    rollout={"max_running": 256},
    learner={"num_ranks": 4, "zero_stage": 3, "dtype": "bfloat16"},
)


def test_the_measured_demo_lies_within_the_estimate() -> None:
    pace = pace_of(shape_of(TINY), DEMO, TWO_CORES, work_of(DEMO, 9), 2)
    assert pace is not None
    # docs/evidence/results.md: 60 batches in 151 to 160 s, with 13 evaluations.
    assert pace.batch_s.low < 155 / 60 < pace.batch_s.high


def test_the_measured_halves_of_the_pipeline_lie_within_the_estimate() -> None:
    # docs/evidence/performance.md: 3.6 M parameters, prompts of 88 and answers of up to 64 tokens on one core each.
    given = settings(sampling={"max_turn_tokens": 126, "max_tokens": 256}, rollout={"num_servers": 1})
    pace = pace_of(shape_of(MEDIUM), given, TWO_CORES, work_of(given, 88), 1)
    assert pace is not None
    assert shape_of(MEDIUM).parameters == pytest.approx(3.6e6, rel=0.2)
    assert pace.sampled.low < 1394 < pace.sampled.high
    # 693 microseconds for an action token, with its share of the prompt: (88 + 63) / 63 tokens.
    assert pace.trained.low < 151 / 63 / 693e-6 < pace.trained.high


def test_twice_the_ranks_train_twice_the_tokens_and_twice_the_rollouts_sample_more() -> None:
    more = GPU.model_copy(update={"learner": GPU.learner.model_copy(update={"num_ranks": 8})})
    assert on_h100s(QWEN3_8B, more).trained.low == pytest.approx(2 * on_h100s(QWEN3_8B, GPU).trained.low)
    few, many = on_h100s(QWEN3_8B, GPU, rollouts=2), on_h100s(QWEN3_8B, GPU, rollouts=4)
    assert few.sampled.low < many.sampled.low <= 2.01 * few.sampled.low


def test_checkpointing_and_the_first_pass_cost_a_forward_each() -> None:
    proximal = GPU.model_copy(update={"objective": settings(objective={"anchor": "proximal"}).objective})
    checkpointed = GPU.model_copy(update={"learner": GPU.learner.model_copy(update={"activation_checkpointing": True})})
    base = on_h100s(QWEN3_8B, GPU).trained.low
    assert base / on_h100s(QWEN3_8B, proximal).trained.low == pytest.approx(4 / 3)
    assert base / on_h100s(QWEN3_8B, checkpointed).trained.low == pytest.approx(4 / 3)


def test_decoding_is_bound_by_the_memory_that_a_step_reads() -> None:
    """A batch of 2 reads nearly all weights for 2 tokens; one of 200 for 200."""
    shape, hardware = shape_of(QWEN3_8B), Hardware(device=device_named("H100"), num_devices=2, is_named=True)
    rates = []
    for running in (2, 200):
        pace = pace_of(shape, GPU, hardware, work_of(GPU, 200), 1, running)
        assert pace is not None
        rates.append(pace.sampled.high)
    weights_s = 2 * shape.parameters / 3.35e12 / 0.7
    assert rates[0] == pytest.approx(2 / (weights_s + 0.002), rel=0.05)
    assert 20 < rates[1] / rates[0] < 100


def test_a_device_of_unknown_speed_has_no_estimate() -> None:
    from gspo_services.shared.estimates import Device

    unknown = Hardware(device=Device(name="X", memory_bytes=1e9, bandwidth=None, peak=None), num_devices=1)
    assert pace_of(shape_of(TINY), DEMO, unknown, work_of(DEMO, 9), 1) is None


def test_a_version_of_30b_takes_seconds_on_several_ranks_and_one_of_the_tiny_model_less_than_one() -> None:
    thirty = version_span(shape_of(QWEN3_30B), GPU, cores=16, num_rollouts=8)
    assert 5 < thirty.low < thirty.high < 90
    alone = GPU.model_copy(update={"learner": GPU.learner.model_copy(update={"num_ranks": 1})})
    assert version_span(shape_of(QWEN3_30B), alone, cores=16, num_rollouts=8).low > 2 * thirty.low
    tiny = version_span(shape_of(TINY), DEMO, cores=2, num_rollouts=2)
    assert tiny.low > 0.01
    assert tiny.high < 1


def test_float32_versions_travel_whole_and_peers_relieve_the_learner() -> None:
    shape = shape_of(QWEN3_8B)
    halves = version_span(shape, GPU, cores=16, num_rollouts=32)
    whole = version_span(shape, settings(), cores=16, num_rollouts=32)
    assert whole.low > 3 * halves.low
    peers = settings(rollout={"peer_weights_endpoint": "tcp://127.0.0.1:*"})
    assert version_span(shape, peers, cores=16, num_rollouts=32).low < 0.5 * whole.low


def test_a_quotient_takes_the_bounds_crosswise() -> None:
    quotient = Span(10, 20).divided_by(Span(2, 5))
    assert (quotient.low, quotient.high) == (2, 10)


@pytest.mark.parametrize(
    ("span", "text"),
    [(Span(1234, 56789), "1,200 to 57,000 s"), (Span(0.051, 0.052), "0.051 to 0.052 s"), (Span(1.04, 1.01), "1.0 s"),
     (Span(14.2, 99.6), "14 to 100 s"), (Span(0, 0), "0 s")],
)  # fmt: skip
def test_an_estimate_shows_two_digits(span: Span, text: str) -> None:
    assert span.seconds == text
