"""The digest of weights that are not kept: their digest is that of all together, and few of them wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gspo_protocol.digests import bytes_digest
from gspo_services.learner.checkpoints import streamed_digest as exported
from gspo_services.learner.checkpoints.digest_stream import streamed_digest
from gspo_services.learner.checkpoints.state_copy import state_digest

NUM = 6


def weights() -> Iterator[tuple[str, Tensor]]:
    """One buffer for all of them, as exports have it."""
    buffer = torch.empty(8, 4)
    for index in range(NUM):
        yield f"layer.{index}", buffer.fill_(index)


@pytest.mark.parametrize("budget_bytes", [0, 300, 10**6])
def test_it_is_the_digest_of_all_tensors_whatever_waits(budget_bytes: int) -> None:
    expected = [
        (name, "torch.float32", (8, 4), bytes_digest(tensor.reshape(-1).view(torch.uint8).numpy().data))
        for name, tensor in weights()
    ]
    assert streamed_digest(weights(), budget_bytes=budget_bytes) == state_digest(expected)
    assert streamed_digest(iter([])) == state_digest([])
    assert exported is streamed_digest


def test_no_more_is_asked_for_than_the_budget_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, third, fourth = [], threading.Event(), threading.Event()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights():
            asked.append(name)
            if len(asked) == 3:
                third.set()
            if len(asked) == 4:
                fourth.set()
            yield name, tensor

    def slow(data: memoryview) -> str:
        assert third.wait(20)
        if not found:
            # The first: nothing else can make room for a fourth.
            found.append(fourth.wait(0.2))
        return bytes_digest(data)

    found: list[bool] = []
    monkeypatch.setattr("gspo_services.learner.checkpoints.digest_stream.bytes_digest", slow)
    monkeypatch.setattr("gspo_services.learner.checkpoints.digest_stream.os.cpu_count", lambda: 1)
    assert len(streamed_digest(watched(), budget_bytes=2 * 8 * 4 * 4)) == 32
    assert found == [False]
    assert len(asked) == NUM
