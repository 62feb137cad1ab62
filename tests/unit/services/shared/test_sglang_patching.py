"""Patches of live parameters: all of a file, or nothing and an answer."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_services.rollout.weights.file import write_arrays
from gspo_services.shared.sglang_patching import apply, patch_parameters
from gspo_services.shared.weights import answer_file, patch_file


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


class Derived(torch.nn.Linear):
    """A model that keeps something made from its parameters."""

    total = 0.0
    scale = 0.0

    def post_load_weights(self) -> None:
        self.total = float(self.bias.detach().sum())

    def refresh_gemma_weight(self) -> None:
        """As one of SGLang's norms does, for itself."""
        self.scale = float(self.bias.detach().sum()) + 1.0


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as tensor rank 0."""
    context = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)


def applied(model: torch.nn.Module, directory: Path) -> dict[str, Any]:
    apply(model, [("patch", torch.tensor(list(str(directory).encode()), dtype=torch.uint8))])
    answer: dict[str, Any] = json.loads((directory / answer_file(0)).read_text())
    return answer


@pytest.mark.usefixtures("parallel")
def test_a_loader_answers_beside_the_patch_and_makes_anew_what_depends_on_it(tmp_path: Path) -> None:
    model = Derived(2, 2)
    write(tmp_path, bias__indices=([0, 1], np.int32), bias__values=([0x40000000, 0x40000000], np.uint32))
    assert applied(model, tmp_path) == {"elements": 2}
    assert (model.total, model.scale) == (4, 5)


@pytest.mark.usefixtures("parallel")
def test_no_error_leaves_the_loader_because_it_would_end_the_server(tmp_path: Path) -> None:
    assert "FileNotFoundError" in applied(Derived(2, 2), tmp_path)["error"]
    (tmp_path / patch_file(0)).write_bytes(b"x" * 100)
    assert "SafetensorError" in applied(Derived(2, 2), tmp_path)["error"]
    apply(Derived(2, 2), [("patch", torch.tensor(list(str(tmp_path / "nothing").encode()), dtype=torch.uint8))])


def test_more_elements_than_a_step_are_all_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_services.shared.sglang_patching.STEP", 2)
    write(tmp_path, a__indices=([0, 2, 3, 4, 6], np.int32), a__values=([0x3F800000] * 5, np.uint32))
    parameters = {"a": torch.zeros(7)}
    assert patch_parameters(parameters, tmp_path) == 5
    assert parameters["a"].tolist() == [1, 0, 1, 1, 1, 0, 1]


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
