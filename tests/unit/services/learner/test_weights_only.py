"""What DeepSpeed's checkpoints may hold."""

import os
import pickle  # noqa: TID251 - to name its error
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils.tensor_fragment import fragment_address

from services.learner.weights_only import weights_only_loads


class Harmful:
    """Makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_is_refused_although_its_reader_asked_for_it(tmp_path: Path) -> None:
    torch.save({"step": 3, "harmful": Harmful(tmp_path / "made")}, tmp_path / "state.pt")
    with weights_only_loads(), pytest.raises(pickle.UnpicklingError, match="mkdir"):
        torch.load(tmp_path / "state.pt", weights_only=False)
    assert not (tmp_path / "made").exists()
    torch.load(tmp_path / "state.pt", weights_only=False)
    assert (tmp_path / "made").exists(), "the file does what it says where nobody forbids it"


def test_what_deepspeed_writes_is_read(tmp_path: Path) -> None:
    written = {"weight": torch.arange(4.0), "scale": LossScaler(scale=2.0), "place": fragment_address(start=3, numel=4)}
    torch.save(written, tmp_path / "state.pt")
    with weights_only_loads():
        read = torch.load(tmp_path / "state.pt", weights_only=False)
    assert read["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (read["scale"].loss_scale, read["place"]) == (2.0, fragment_address(start=3, numel=4))


def test_other_loads_are_as_they_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    with weights_only_loads():
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "0"
