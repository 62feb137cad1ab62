"""The loss and its inputs on one GPU: results stay on the device of what was given, and equal those of the CPU."""

from __future__ import annotations

import pytest
import torch

from gspo.advantages import group_advantages, turn_advantages
from gspo.padded import padded_loss
from gspo.settings import Objective

pytestmark = pytest.mark.gpu


def test_rewards_on_the_gpu_give_advantages_on_the_gpu() -> None:
    rewards_M = torch.tensor([1.0, 0.0, 0.5, 0.5])
    on_gpu, on_cpu = group_advantages(rewards_M.cuda(), [0, 0, 1, 1]), group_advantages(rewards_M, [0, 0, 1, 1])
    for name in ("advantages_M", "zero_advantage_M", "members_M"):
        assert getattr(on_gpu, name).is_cuda, name
        assert torch.equal(getattr(on_gpu, name).cpu(), getattr(on_cpu, name)), name
    turns = turn_advantages([rewards_M.cuda(), rewards_M[:2].cuda()], [0, 0])
    assert all(values.is_cuda for values in turns.advantages)
    assert turns.zero_advantage_M.is_cuda


def test_the_loss_of_rows_on_the_gpu_is_that_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    behaviour_SL = -torch.rand(8, 50, generator=generator)
    logprobs_SL = behaviour_SL + 1e-3 * torch.randn(8, 50, generator=generator)
    mask_SL = torch.rand(8, 50, generator=generator) < 0.8
    found = []
    for device in ("cpu", "cuda"):
        leaf = logprobs_SL.to(device, copy=True).requires_grad_()
        advantages_S = group_advantages(torch.arange(8.0, device=device), [0] * 8).advantages_M
        inputs = (leaf, behaviour_SL.to(device), advantages_S, mask_SL.to(device))
        output = padded_loss(Objective.gspo(), *inputs, num_sequences=8, with_tokens=True)
        output.loss.backward()
        assert leaf.grad is not None
        assert output.tokens is not None
        found.append((output.loss.detach().cpu(), leaf.grad.cpu(), output.tokens.ratio.cpu()))
    # The loss is a sum of terms of about 1 that cancel: it is right to the rounding of those, not of itself.
    for (on_cpu, on_gpu), absolute in zip(zip(*found, strict=True), (1e-7, 1e-8, 1e-8), strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-6, atol=absolute)
