"""A checkpoint's copies have a budget: what exceeds it is written at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gspo_services.learner.checkpoints import TensorFile
from gspo_services.learner.engine.expert_parallel import ExpertShare
from gspo_services.learner.engine.optimizer_state import OptimizerState

FILE_BYTES = 3 * 4 * 10


class FourParameters(OptimizerState):
    """The state of four parameters of ten elements, which this rank writes."""

    def __init__(self) -> None:
        super().__init__(None, 3, {})

    def _files(self) -> Iterator[TensorFile]:
        for index in range(4):
            kinds = {kind: torch.full((10,), float(index)) for kind in ("weight", "exp_avg", "exp_avg_sq")}
            yield TensorFile(stem=f"p{index}", tensors={f"p{index}/{kind}": tensor for kind, tensor in kinds.items()})


@pytest.mark.parametrize(("budget_bytes", "num_copied"), [(0, 0), (FILE_BYTES - 1, 0), (2.5 * FILE_BYTES, 2), (1e12, 4)])
def test_copies_are_made_as_long_as_there_is_room(tmp_path: Path, budget_bytes: float, num_copied: int) -> None:
    directory = tmp_path / "engine"
    state = FourParameters().copy(directory, budget_bytes)
    assert [file.stem for file in state.copied] == ["p0", "p1", "p2", "p3"][:num_copied]
    assert [path.name for path in state.written] == [f"p{index}.safetensors" for index in range(num_copied, 4)]
    assert sum(tensor.nbytes for file in state.copied for tensor in file.tensors.values()) <= budget_bytes
    assert state.failure is None
    copied = [file.write(directory) for file in state.copied if directory.exists() or directory.mkdir() is None]
    assert sorted([*copied, *state.written]) == [directory / f"p{index}.safetensors" for index in range(4)]


def spread_in(shares: dict[int, ExpertShare], named: list[tuple[str, torch.nn.Parameter]]) -> list[torch.Tensor]:
    OptimizerState(None, 0, shares, trained=named).spread(seed=5, evenly=True)
    return [parameter.detach() for _, parameter in named]


def test_masters_are_spread_alike_whichever_ranks_hold_the_experts() -> None:
    prefix = "model.layers.0.mlp"
    weights = {name: torch.randn(4, 6, 5).bfloat16().float() for name in ("gate_up_proj", "down_proj")}
    router = torch.randn(4, 5).bfloat16().float()
    fused = [(f"{prefix}.experts.{name}", torch.nn.Parameter(value.clone())) for name, value in weights.items()]
    gate_up, down, whole = spread_in({}, [*fused, (f"{prefix}.gate.weight", torch.nn.Parameter(router.clone()))])
    assert not torch.equal(down, weights["down_proj"])
    for rank in range(2):
        experts = slice(2 * rank, 2 * rank + 2)
        parts = {"w1": weights["gate_up_proj"][:, :3], "w3": weights["gate_up_proj"][:, 3:], "w2": weights["down_proj"]}
        slabs = [(f"{prefix}.experts.{name}", torch.nn.Parameter(part[experts].clone())) for name, part in parts.items()]
        shares = {id(parameter): ExpertShare(None, rank, 2) for _, parameter in slabs}
        own = (f"{prefix}.gate.weight", torch.nn.Parameter(router.clone()))
        w1, w3, w2, gate = spread_in(shares, [*slabs, own])
        assert torch.equal(torch.cat([w1, w3], dim=1), gate_up[experts])
        assert torch.equal(w2, down[experts])
        assert torch.equal(gate, whole)


def test_a_disk_that_takes_nothing_is_reported_after_the_last_parameter(tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("a file in the directory's place")
    state = FourParameters().copy(tmp_path / "engine", 0)
    assert isinstance(state.failure, OSError)
    assert (state.copied, state.written) == ([], [])
