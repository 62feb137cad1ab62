"""Models read range by range, against ``from_pretrained``; and folders that do not hold what config.json describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gspo.model.attention import register_segment_attention
from gspo.model_files import folder as folder_module
from gspo.model_files.folder import ModelFilesError, ModelFolder
from gspo.model_files.loading import OwnRange, load_from_files
from gspo.model_files.sources import WantedTensor, sources_of
from tests.support.starts.small_models import KINDS, save_small_model, small_model

NUM_RANKS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Shares:
    """The ``WeightPlaces`` of one of several ranks: of each parameter it keeps one of ``NUM_RANKS`` equal parts."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kept: list[Tensor] = []
        self.has_built = False
        self.agreements: list[ModelFilesError | None] = []

    @contextmanager
    def building(self) -> Iterator[None]:
        self.has_built = True
        yield

    def converting(self) -> Any:
        return nullcontext()

    def own_range(self, parameter: nn.Parameter) -> OwnRange:
        length = -(-parameter.numel() // NUM_RANKS)
        start = self.rank * length
        part = torch.full((max(0, min(length, parameter.numel() - start)),), torch.nan, dtype=parameter.dtype)
        self.kept.append(part)
        return OwnRange(part, start)

    def agree(self, error: ModelFilesError | None) -> None:
        self.agreements.append(error)
        if error is not None:
            raise error


def load(directory: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    return load_from_files(directory, dtype, attention=register_segment_attention(), **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_bit_for_bit_that_of_from_pretrained(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    save_small_model(tmp_path, kind)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 2
    found, expected = load(tmp_path, dtype), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(found) is type(expected)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in expected.named_parameters()]
    buffers = dict(expected.named_buffers())
    for name, tensor in [*found.state_dict().items(), *found.named_buffers()]:
        other = buffers.get(name, expected.state_dict().get(name))
        assert other is not None
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other), name
    assert found.config.to_dict() | {"_name_or_path": ""} == expected.config.to_dict() | {"_name_or_path": ""}
    assert not found.training


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen3_tied"])
def test_ranks_read_only_their_own_ranges_and_have_everything_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    save_small_model(tmp_path, kind)
    read = 0

    def counted(self: ModelFolder, stored: Any, start: int, target: Tensor) -> None:
        nonlocal read
        read += target.numel()
        plain(self, stored, start, target)

    plain = ModelFolder.read
    monkeypatch.setattr(folder_module.ModelFolder, "read", counted)
    ranks = [Shares(rank) for rank in range(NUM_RANKS)]
    for rank in ranks:
        load(tmp_path, placement=rank)
    parameters = list(small_model(kind).parameters())
    assert read == sum(parameter.numel() for parameter in parameters)
    for index, parameter in enumerate(parameters):
        assert torch.equal(torch.cat([rank.kept[index] for rank in ranks]), parameter.detach().view(-1))


def test_a_tied_head_is_found_under_either_name_and_fused_experts_as_they_are(tmp_path: Path) -> None:
    save_small_model(tmp_path / "tied", "qwen3_tied")
    tensors = everything(tmp_path / "tied")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    rewrite(tmp_path / "tied", tensors)
    assert torch.equal(load(tmp_path / "tied").model.embed_tokens.weight, tensors["lm_head.weight"])
    save_small_model(tmp_path / "fused", "qwen3_moe")
    whole = small_model("qwen3_moe").state_dict()
    rewrite(tmp_path / "fused", {name: tensor.clone() for name, tensor in whole.items()})
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load(tmp_path / "fused").state_dict().items())


def everything(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> None:
    """As one file, which comes before the others."""
    save_file(tensors, directory / "model.safetensors")


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (EXPERT, None, f"has no {EXPERT}, which config.json asks for"),
        (NORM, None, f"has no {NORM}, which config.json asks for"),
        (EXPERT, torch.zeros(24, 31), rf"{EXPERT} is \[24, 31\], config.json asks for \[24, 32\]"),
        (NORM, torch.zeros(32, dtype=torch.int32), f"{NORM} is stored as I32, which cannot be trained"),
        (NORM, torch.zeros(32).to(torch.float8_e4m3fn), f"{NORM} is stored as F8_E4M3, which cannot be trained"),
    ],
)
def test_a_folder_without_what_its_configuration_describes_is_refused_before_memory_is_taken(
    tmp_path: Path, name: str, value: Tensor | None, expected: str
) -> None:
    save_small_model(tmp_path, "qwen3_moe")
    tensors = everything(tmp_path)
    tensors.pop(name)
    rewrite(tmp_path, tensors if value is None else tensors | {name: value})
    rank = Shares(0)
    with pytest.raises(ModelFilesError, match=expected) as found:
        load(tmp_path, placement=rank)
    assert "the model" in str(found.value)
    assert not rank.has_built
    assert len(rank.agreements) == 1


def test_a_configuration_of_another_size_is_refused(tmp_path: Path) -> None:
    save_small_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(ModelFilesError, match=r"has no model\.layers\.2\."):
        load(tmp_path)


def test_weights_that_a_conversion_turns_round_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.core_model_loading

    model, name = small_model("qwen3_moe"), "model.layers.0.mlp.experts.down_proj"
    shape = (4, 32, 24)
    assert sources_of(model, name, shape) == [
        WantedTensor(f"model.layers.0.mlp.experts.{expert}.down_proj.weight", (32, 24)) for expert in range(4)
    ]

    def turned(_: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}.{expert}": each.transpose(0, 1) for expert, each in enumerate(state[name])}

    monkeypatch.setattr(transformers.core_model_loading, "revert_weight_conversion", turned)
    assert sources_of(model, name, shape) is None
    monkeypatch.setattr(
        transformers.core_model_loading,
        "revert_weight_conversion",
        lambda _, state: {f"{name}.{half}": each for half, each in enumerate(state[name].flip(1).chunk(2, dim=1))},
    )
    assert sources_of(model, name, shape) is None
