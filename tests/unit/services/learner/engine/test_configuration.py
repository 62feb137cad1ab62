"""What DeepSpeed is told, by device and model."""

from typing import Any

import pytest
import torch.distributed

from gspo_services.learner.engine.configuration import deepspeed_config, stage_inside
from gspo_services.learner.start import Device, EngineSettings
from gspo_services.shared.settings.sections import Learner
from tests.support.checking.shapes import QWEN3_06B, QWEN3_30B


def told(device: Device, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **learner: Any) -> dict[str, Any]:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    settings = EngineSettings(
        learner=Learner(**learner), device=device, max_sequence_tokens=None, routing_replay=False, seed=0
    )
    return deepspeed_config(settings, model)


@pytest.mark.parametrize(
    ("device", "offload"), [("cpu", "none"), ("cpu", "optimizer"), ("cuda", "none"), ("cuda", "optimizer")]
)
def test_adam_is_one_pass_over_memory(device: Device, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = told(device, QWEN3_06B, monkeypatch, zero_stage=2, offload=offload)
    assert config["optimizer"]["params"]["fused"] is True


def test_zero_3_has_room_for_the_next_layer_of_many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = 128 * 3 * 2048 * 768
    config = told("cuda", QWEN3_30B, monkeypatch, zero_stage=3)["zero_optimization"]
    assert config["stage3_max_live_parameters"] > 2 * layer
    assert config["stage3_prefetch_bucket_size"] >= layer
    dense = told("cuda", QWEN3_06B, monkeypatch, zero_stage=3)["zero_optimization"]
    assert (dense["stage3_max_live_parameters"], dense["stage3_prefetch_bucket_size"]) == (10**9, 50_000_000)
    shared = told("cuda", QWEN3_30B, monkeypatch, zero_stage=3, num_ranks=8, expert_parallel=8)["zero_optimization"]
    assert shared["stage3_prefetch_bucket_size"] == layer // 8
    unknown = told("cuda", {"model_type": "unheard of"}, monkeypatch, zero_stage=3)["zero_optimization"]
    assert "stage3_max_live_parameters" not in unknown


@pytest.mark.parametrize(("device", "ahead"), [("cpu", False), ("cuda", True)])
def test_on_gpus_tokens_are_packed_while_their_numbers_go_to_the_host(
    device: Device, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = told(device, QWEN3_30B, monkeypatch, zero_stage=2, num_ranks=8, expert_parallel=2)
    assert config["expert_parallel"]["async_split_plan"] is ahead


@pytest.mark.parametrize(
    ("ranks", "leaves", "learner", "stage"),
    [
        (1, False, {}, 0),
        (2, False, {}, 1),
        (1, True, {}, 1),
        (1, False, {"dtype": "bfloat16"}, 1),
        (1, False, {"offload": "optimizer"}, 1),
        (1, False, {"zero_stage": 2}, 2),
        (1, False, {"zero_stage": 0}, 0),
    ],
)
def test_one_rank_in_float32_runs_zero_1_without_its_copies(
    ranks: int, leaves: bool, learner: dict[str, Any], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    settings = EngineSettings(
        learner=Learner(**learner),
        device="cpu",
        max_sequence_tokens=None,
        routing_replay=False,
        seed=0,
        leaves_device=leaves,
    )
    assert stage_inside(settings) == stage
    config = deepspeed_config(settings, QWEN3_06B)
    assert config["zero_optimization"]["stage"] == stage
    # Without ZeRO the engine clips by itself.
    assert config["gradient_clipping"] == (0.0 if stage == 0 else 1.0)
