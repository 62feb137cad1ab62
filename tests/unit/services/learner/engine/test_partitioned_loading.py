"""What loading into partitions relies on in DeepSpeed, whose names for it are private."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from gspo.model.policy import load_policy
from gspo.model_files.folder import ModelFilesError
from gspo_services.learner.engine.partitioned_loading import AgreedWhole, OwnRangeInit, OwnRanges, agree_on_error
from gspo_services.learner.engine.process_group import init_distributed
from tests.support.starts.small_models import save_small_model, small_model

CONFIGURATION = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A process group of this process."""
    if os.environ.get("DS_ACCELERATOR", "cpu") != "cpu" or torch.cuda.is_available():
        pytest.skip("DeepSpeed has chosen another device in this process")
    init_distributed("cpu")
    yield
    torch.distributed.destroy_process_group()


def test_deepspeed_does_to_a_new_parameter_what_ours_does_and_sends_it() -> None:
    # Another release: see that OwnRangeInit still does everything but the broadcast.
    source = [line.strip() for line in inspect.getsource(deepspeed.zero.Init._zero_init_param).splitlines()]
    assert source == [
        "def _zero_init_param(self, param):",
        "self._convert_to_deepspeed_param(param)",
        "partition_group = self.get_partition_dp_group(param)",
        "if dist.get_world_group() == partition_group:",
        "dist.broadcast(param.data.view(torch.uint8), 0, partition_group)",
        "else:",
        "dist.broadcast(param.data.view(torch.uint8), dist.get_global_rank(partition_group, 0), partition_group)",
        "param.partition()",
    ]


def test_a_parameter_made_inside_is_partitioned_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(deepspeed.comm, "broadcast", lambda tensor, *_: sent.append(tensor))
    with OwnRangeInit(config_dict_or_path=CONFIGURATION):
        layer: Any = torch.nn.Linear(5, 3, bias=False)
    assert sent == []
    assert layer.weight.numel() == 0
    assert (layer.weight.ds_shape, layer.weight.ds_numel) == ((3, 5), 15)
    assert layer.weight.ds_tensor.dim() == 1
    assert layer.weight.ds_tensor.ds_numel == layer.weight.ds_tensor.numel() >= 15


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_tied"])
def test_a_model_read_into_partitions_is_the_saved_one(tmp_path: Path, kind: str) -> None:
    save_small_model(tmp_path, kind)
    placement = OwnRanges(CONFIGURATION, torch.device("cpu"))
    model = load_policy(tmp_path, torch.float32, placement)
    expected = dict(small_model(kind).named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        assert parameter.numel() == 0, name
        # The only rank's part is all of it.
        part: Any = parameter.ds_tensor
        assert torch.equal(part[: expected[name].numel()], expected[name].detach().view(-1)), name


def test_what_is_partitioned_after_loading_is_sent_as_deepspeed_does(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = OwnRanges(CONFIGURATION, torch.device("cpu"))
    with placement.building():
        layer: Any = torch.nn.Linear(2, 2)
    sent = []
    monkeypatch.setattr("deepspeed.runtime.zero.partition_parameters.dist.broadcast", lambda tensor, *_: sent.append(tensor))
    later = torch.nn.Parameter(torch.ones(4))
    layer.weight.convert_to_zero_parameters(param_list=[later])
    assert len(sent) == 1


def test_an_error_is_raised_and_none_is_not() -> None:
    agree_on_error(None, torch.device("cpu"))
    with pytest.raises(ModelFilesError, match=r"^gone: model$"):
        agree_on_error(ModelFilesError("gone: model"), torch.device("cpu"))
    with pytest.raises(ModelFilesError, match=r"^ä{100}"):
        AgreedWhole(torch.device("cpu")).agree(ModelFilesError("ä" * 5000))
