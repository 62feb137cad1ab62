"""Kernels that cannot be used, or are wrong, are not used, and the log says so."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.model.logprobs import choice

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    choice.kernels_for.cache_clear()
    yield
    choice.kernels_for.cache_clear()


class Right:
    """What the kernels do, in plain PyTorch."""

    @staticmethod
    def sums(logits: Tensor, temperatures: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        tempered = logits / temperatures[:, None]
        normalisers = tempered.logsumexp(-1)
        return normalisers, tempered.gather(-1, targets[:, None]).squeeze(-1) - normalisers, logits.new_empty(0)

    @staticmethod
    def slopes_(
        logits: Tensor, temperatures: Tensor, targets: Tensor, normalisers: Tensor, gradients: Tensor, *_: Any
    ) -> None:
        slopes = -(logits / temperatures[:, None] - normalisers[:, None]).exp() * gradients[:, None]
        logits.copy_(slopes.scatter_add_(-1, targets[:, None], gradients[:, None]))


def broken(logits: Tensor, *_: Any) -> None:
    raise RuntimeError("no C compiler")


def wrong(logits: Tensor, *rest: Any) -> None:
    Right.slopes_(logits, *rest)
    logits[-1, -1] += 1e-3


def unset(logits: Tensor, *rest: Any) -> None:
    logits.fill_(torch.nan)


def test_kernels_that_give_what_is_right_are_used_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(choice.importlib, "import_module", lambda name: tried.append(name) or Right)
    assert choice.kernels_for(CPU) is choice.kernels_for(CPU) is Right
    assert tried == [choice.MODULE]


@pytest.mark.parametrize(("slopes_", "said"), [(broken, "no C compiler"), (wrong, "off by 0.001"), (unset, "off by nan")])
def test_kernels_that_fail_or_are_wrong_are_not_used_and_the_log_says_why(
    slopes_: Any, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(sums=Right.sums, slopes_=slopes_)
    monkeypatch.setattr(choice.importlib, "import_module", lambda _: module)
    assert choice.kernels_for(CPU) is None
    assert said in caplog.text
    assert "learner.fused_head = false" in caplog.text


def test_without_triton_plain_pytorch_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(choice.importlib, "import_module", absent)
    assert choice.kernels_for(CPU, has_values=False) is None
    assert "No module named 'triton'" in caplog.text
