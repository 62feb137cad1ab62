"""Patches of live parameters: all of a file, or nothing and an answer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_services.rollout.weights.file import write_arrays
from gspo_services.shared.sglang_cpu.patching import announce_patches, enable_patches, patch_parameters
from gspo_services.shared.weights import ABILITY, LOAD_FORMAT, patch_file


def write(directory: Path, **arrays: Any) -> Path:
    named = {name.replace("__", "."): [np.array(values, kind)] for name, (values, kind) in arrays.items()}
    write_arrays(directory / patch_file(0), named)
    return directory


def test_named_elements_get_their_bits_and_no_others(tmp_path: Path) -> None:
    parameters = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.nn.Parameter(torch.zeros(4))}
    write(
        tmp_path,
        a__indices=([5, 0], np.int32), a__values=([0x7F80, 0xBF80], np.uint16),
        b__indices=([2], np.int64), b__values=([0x3F800000], np.uint32),
    )  # fmt: skip
    assert patch_parameters(parameters, tmp_path) == 3
    assert parameters["a"].tolist() == [[-1, 0, 0], [0, 0, float("inf")]]
    assert parameters["b"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "indices", "values", "words"),
    [
        ("b", [4], [1], "places 4 to 4 of b, which has 4 elements"),
        ("b", [-1], [1], "places -1 to -1"),
        ("b", [1, 2], [1], "2 places and 1 values"),
        ("c", [1], [1], "no parameter c"),
        ("half", [1], [1], "values of 4 bytes do not fit half"),
        ("turned", [1], [1], "do not fit turned"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    tmp_path: Path, name: str, indices: list[int], values: list[int], words: str
) -> None:
    parameters = {
        "a": torch.zeros(4), "b": torch.zeros(4), "half": torch.zeros(4).half(), "turned": torch.zeros(2, 3).t()
    }  # fmt: skip
    write(
        tmp_path,
        a__indices=([0], np.int32), a__values=([9], np.uint32),
        **{f"{name}__indices": (indices, np.int64), f"{name}__values": (values, np.uint32)},
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        patch_parameters(parameters, tmp_path)
    assert not any(tensor.any() for tensor in parameters.values())


def test_other_formats_are_loaded_as_before_and_an_error_is_an_answer(tmp_path: Path) -> None:
    class WeightUpdater:
        model = torch.nn.Linear(2, 2)
        tp_rank = 0

        def get_model(self) -> torch.nn.Module:
            return self.model

        def _assert_weight_cache_inactive(self, op: str) -> None:
            assert op == "update_weights_from_disk"

        def update_weights_from_disk(self, model_path: str, load_format: str, **named: Any) -> tuple[bool, str]:
            return True, f"{model_path} {load_format} {named}"

    enable_patches(SimpleNamespace(WeightUpdater=WeightUpdater))
    updater: Any = WeightUpdater()
    assert updater.update_weights_from_disk("x", "safetensors", recapture_cuda_graph=False) == (
        True,
        "x safetensors {'recapture_cuda_graph': False}",
    )
    write(tmp_path, bias__indices=([1], np.int32), bias__values=([0x40000000], np.uint32))
    assert updater.update_weights_from_disk(str(tmp_path), LOAD_FORMAT, recapture_cuda_graph=False)[0]
    assert updater.model.bias[1] == 2
    is_done, text = updater.update_weights_from_disk(str(tmp_path / "nothing"), LOAD_FORMAT)
    assert (is_done, "not patched: FileNotFoundError" in text) == (False, True)


def test_the_server_says_so_once() -> None:
    arguments = SimpleNamespace(custom_weight_loader=None)
    announce_patches(arguments)
    announce_patches(arguments)
    assert arguments.custom_weight_loader == [ABILITY]


def test_each_rank_takes_its_own_file(tmp_path: Path) -> None:
    for rank in range(2):
        arrays = {"a.indices": [np.array([rank], np.int32)], "a.values": [np.array([0x3F800000], np.uint32)]}
        write_arrays(tmp_path / patch_file(rank), arrays)
    parameters = {"a": torch.zeros(2)}
    assert patch_parameters(parameters, tmp_path, 1) == 1
    assert parameters["a"].tolist() == [0, 1]
    write_arrays(tmp_path / patch_file(1), {})
    assert patch_parameters(parameters, tmp_path, 1) == 0
    with pytest.raises(OSError, match="No such file"):
        patch_parameters(parameters, tmp_path, 2)
