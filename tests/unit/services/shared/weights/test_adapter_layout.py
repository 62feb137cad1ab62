"""The names of adapters that are published as such, and what must lie in their slots."""

import pytest

from gspo_protocol.messages import AdapterInfo, TensorInfo
from gspo_services.shared.weights import (
    MODULES,
    layouts,
    peft_config,
    require_matrices,
    slot_checksums,
    slot_name,
    xxh3_checksum,
)

INFO = AdapterInfo(rank=2, alpha=4.0, modules=list(MODULES), base_digest="d")
WIDTHS = {"q": (6, 4), "k": (6, 2), "v": (6, 2), "o": (4, 6)}
"""In and out of each projection."""
OF_AN_EXPERT = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"


def matrices(num_layers: int = 2) -> list[TensorInfo]:
    found = []
    for layer in range(num_layers):
        for part, (width, height) in WIDTHS.items():
            for side, shape in (("A", [2, width]), ("B", [height, 2])):
                name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_{side}.weight"
                found.append(TensorInfo(name, "float32", shape, 0, 4 * shape[0] * shape[1], "0" * 64))
    return found


def test_a_whole_adapter_is_taken_in_any_order() -> None:
    require_matrices(INFO, matrices())
    require_matrices(INFO, matrices()[::-1])


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (matrices()[:-1], "the adapter has no o_proj.lora_B of layer 1"),
        (matrices()[8:], "the adapter has no k_proj.lora_A of layer 0"),
        ([], "the adapter has no k_proj.lora_A of layer 0"),
        (
            [*matrices(), TensorInfo("model.norm.weight", "float32", [4], 0, 16, "0" * 64)],
            "tensor model.norm.weight is no matrix of an adapter of q_proj, k_proj, v_proj, o_proj",
        ),
        (
            [
                *matrices(),
                TensorInfo(OF_AN_EXPERT, "float32", [2, 4], 0, 32, "0" * 64),
            ],
            f"tensor {OF_AN_EXPERT} is no matrix",
        ),
    ],
)  # fmt: skip
def test_what_is_no_whole_adapter_of_attention_is_named(tensors: list[TensorInfo], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        require_matrices(INFO, tensors)


def test_a_matrix_of_another_rank_is_named_with_its_shape() -> None:
    other = AdapterInfo(rank=3, alpha=4.0, modules=list(MODULES), base_digest="d")
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight has shape \[2, 6\], and the adapter's rank is 3"):
        require_matrices(other, matrices())


def test_a_slot_has_the_matrices_of_q_k_and_v_one_below_the_other() -> None:
    tensors = matrices(1)
    data = [bytes([index]) * info.num_bytes for index, info in enumerate(tensors)]
    q_a, q_b, k_a, k_b, v_a, v_b, o_a, o_b = data
    assert slot_checksums("n", tensors[::-1], data[::-1], xxh3_checksum) == {
        slot_name("n", 0, "qkv_proj", "A"): xxh3_checksum([q_a + k_a + v_a]),
        slot_name("n", 0, "qkv_proj", "B"): xxh3_checksum([q_b + k_b + v_b]),
        slot_name("n", 0, "o_proj", "A"): xxh3_checksum([o_a]),
        slot_name("n", 0, "o_proj", "B"): xxh3_checksum([o_b]),
    }


def test_the_names_of_slots_are_skipped_by_none_of_the_words_that_skip_parameters() -> None:
    """A rollout asks for slots alone: hashing the model each time would stop generation for it."""
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    parameters = layouts([TensorInfo(name, "float32", [64, 1], 0, 256, "0" * 64) for name in names])
    assert all("model." in name or "lm_head" in name for name in parameters)
    assert not any(word in slot_name("gspo-1f-2-v3", 4, "qkv_proj", "A") for word in ("model.", "lm_head"))


def test_the_configuration_is_pefts() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{key: value for key, value in peft_config(INFO).items() if key != "peft_type"})
    assert (config.r, config.lora_alpha, config.target_modules) == (2, 4.0, set(MODULES))
