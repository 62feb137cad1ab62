"""The options of the objective in a batch: what the trainer adds to the loss does not depend on how a step is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gspo.settings import Objective
from services.learner.trainer import AdvantageSettings, sequences_with_advantages
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.loss.sequences import random_groups
from tests.unit.services.learner.test_trainer import WIDE, own_logprobs, train


@pytest.mark.parametrize(
    "options",
    [{"aggregation": "token"}, {"aggregation": "constant", "aggregation_tokens": 12}],
    ids=lambda x: x["aggregation"],
)
def test_an_on_policy_step_weighs_tokens_as_its_aggregation_says_whatever_the_token_budget(options: dict[str, Any]) -> None:
    objective: Objective = replace(WIDE, **options)
    groups = own_logprobs(BigramEngine(), random_groups(3, 4, seed=1))
    table = BigramEngine().table.detach().clone().requires_grad_()
    sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
    num_tokens = sum(sequence.num_action_tokens for sequence in sequences)
    divisor = num_tokens if objective.aggregation == "token" else 12 * len(sequences)
    loss = torch.zeros(())
    for sequence in sequences:
        assert sequence.advantages is not None
        logprobs = torch.log_softmax(table, -1)[sequence.token_ids[:-1], sequence.token_ids[1:]]
        loss = loss - (logprobs * torch.from_numpy(sequence.advantages[1:])).sum() / divisor
    (expected,) = torch.autograd.grad(loss, table)
    for token_budget in (50, 10_000):
        engine = BigramEngine(token_budget=token_budget)
        train(engine, groups, objective)
        torch.testing.assert_close(engine.gradients[0], expected, rtol=1e-4, atol=1e-6)
