"""Spread masters round to the same weights, lie evenly in what does, and let a small step count as much as a large one."""

import pytest
import torch
from torch import Tensor

from gspo_services.learner.engine import spread_masters as module
from gspo_services.learner.engine.spread_masters import spread

NAME = "model.layers.0.mlp.experts.gate_up_proj"


RECORDED = [0.9998282194137573, 1.0030337572097778, 0.9993305206298828, 0.2999213933944702, -1.9995100498199463]


def weights(number: int = 200_000) -> Tensor:
    return (0.05 * torch.randn(number, generator=torch.Generator().manual_seed(0))).bfloat16().float()


def odd_weights() -> Tensor:
    # Below a power of two the spacing is half as wide.
    powers = torch.ldexp(torch.ones(250), torch.arange(-125, 125))
    odd = torch.tensor([0.0, -0.0, 2.0**-126, 1e-40, 3e38])
    return torch.cat([odd, powers, -powers]).bfloat16().float()


def spread_of(start: Tensor, name: str = NAME, first: int = 0, seed: int = 0) -> Tensor:
    masters = start.clone()
    spread(masters, name, first, seed)
    return masters


def test_the_policy_stays_the_same_to_the_bit() -> None:
    for start in (odd_weights(), weights()):
        masters = spread_of(start)
        assert torch.equal(masters.bfloat16().view(torch.int16), start.bfloat16().view(torch.int16))
    assert (masters != start).float().mean() > 0.999
    zeros = torch.tensor([0.0, -0.0])
    assert torch.equal(spread_of(zeros).view(torch.int32), zeros.view(torch.int32))


def test_masters_lie_evenly_in_all_that_rounds_to_their_weights() -> None:
    start = weights()
    places = (spread_of(start) - start) / torch.ldexp(torch.ones_like(start), torch.frexp(start).exponent - 8)
    shares = torch.histc(places, 10, -0.5, 0.5) / len(places)
    assert shares.tolist() == pytest.approx([0.1] * 10, abs=0.005)


@pytest.mark.parametrize(("evenly", "fall"), [(True, 0.1), (False, 0.15)])
@pytest.mark.parametrize("weight", [1.0, -0.25])
def test_a_power_of_two_moves_as_far_as_its_steps_where_the_spacing_below_is_half(
    weight: float, evenly: bool, fall: float
) -> None:
    masters = torch.full((200_000,), weight)
    spread(masters, NAME, 0, 0, evenly=evenly)
    spacing = weight * 2.0**-7
    for step, expected in ((0.1, 0.1), (-0.1, -fall)):
        moved = ((masters + step * spacing).bfloat16().float() - weight).mean() / spacing
        assert moved == pytest.approx(expected, abs=0.003)


def test_recorded_runs_have_the_masters_that_they_had() -> None:
    masters = torch.cat([torch.ones(3), torch.tensor([0.3, -2.0]).bfloat16().float()])
    spread(masters, NAME, 0, 0, evenly=False)
    assert masters.tolist() == RECORDED


@pytest.mark.parametrize("step", [1e-6, 1e-5, 1e-4])
def test_a_step_moves_the_weights_by_its_size_on_average(step: float) -> None:
    start = weights()
    moved = ((spread_of(start) + step).bfloat16().float() - start).mean()
    assert moved == pytest.approx(step, rel=0.15)
    if step == 1e-6:
        assert ((start + step).bfloat16().float() - start).mean() < 0.35 * step, "most of it is lost in the middle"


def test_ranks_that_share_a_parameter_find_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    start = weights(10_000)
    whole = spread_of(start)
    monkeypatch.setattr(module, "STEP", 777)
    for begin, end in ((0, 3), (3, 5_001), (5_001, len(start))):
        assert torch.equal(spread_of(start[begin:end], first=begin), whole[begin:end])


def test_another_seed_and_another_parameter_have_others() -> None:
    start = weights(10_000)
    found = [spread_of(start), spread_of(start, seed=1), spread_of(start, name="lm_head.weight")]
    for index, one in enumerate(found):
        for other in found[:index]:
            assert torch.corrcoef(torch.stack([one - start, other - start]))[0, 1].abs() < 0.05
