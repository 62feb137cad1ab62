"""Log-probs that are not finite: a loss function never sees them, and no step uses them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, pack
from gspo.settings import Objective
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.engine.gradients import NonFiniteLossError
from gspo_services.learner.engine.step import micro_batch_loss
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import train
from tests.support.loss.sequences import random_groups


def packed_and_seen() -> tuple[PackedBatch, list[Tensor]]:
    members, _ = sequences_with_advantages(random_groups(1, 2, seed=3), AdvantageSettings())
    return pack(members, policy_version=0), []


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_the_loss_is_nan_where_an_action_tokens_log_prob_is_not_finite_and_only_there(bad: float) -> None:
    packed, seen = packed_and_seen()
    on_action, off_action = int(packed.mask_T.nonzero()[1]), int((~packed.mask_T).nonzero()[0])

    def loss_fn(_: PackedBatch, result: TokenLogProbs) -> Tensor:
        seen.append(result.logprobs_T.detach())
        return result.logprobs_T[packed.mask_T].sum()

    for place, is_sound in ((off_action, True), (on_action, False)):
        logprobs_T = -torch.arange(1.0, packed.mask_T.shape[0] + 1)
        expected = float(logprobs_T[packed.mask_T].sum())
        logprobs_T[place] = bad
        loss = micro_batch_loss(packed, TokenLogProbs(logprobs_T.requires_grad_(), None), loss_fn)
        assert float(loss.detach()) == expected if is_sound else loss.isnan()
        assert seen[-1][place] == 0
        assert bool(seen[-1].isfinite().all())
        loss.backward()


def test_an_empty_micro_batch_has_a_loss_of_zero_with_a_gradient_and_calls_no_loss_function() -> None:
    logprobs_T = torch.tensor([-1.0], requires_grad=True)

    def never(_: PackedBatch, __: TokenLogProbs) -> Tensor:
        raise AssertionError("asked")

    loss = micro_batch_loss(pack([], policy_version=0), TokenLogProbs(logprobs_T, None), never)
    loss.backward()
    assert (float(loss.detach()), logprobs_T.grad) == (0.0, torch.zeros(1))


def test_log_probs_of_the_batchs_start_that_are_not_finite_end_the_batch_before_its_first_step() -> None:
    engine = BigramEngine()
    with torch.no_grad():
        engine.table[3] = math.nan
    with pytest.raises(NonFiniteLossError, match="some log-probs of the batch's start are not finite"):
        train(engine, random_groups(2, 3, seed=1), Objective(anchor="proximal"))
    assert engine.gradients == []
