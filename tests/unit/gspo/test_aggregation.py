"""What the aggregation refuses, and that an episode of one sequence is the sequence."""

from __future__ import annotations

from random import Random

import pytest
import torch

from gspo.loss import gspo_loss
from gspo.options.aggregation import Reduction, episode_tokens
from gspo.settings import Objective
from gspo.staleness import clip_range
from tests.support.loss.option_cases import fast_loss, random_case


def test_an_episode_counts_the_tokens_of_all_its_sequences() -> None:
    tokens_S = episode_tokens(torch.tensor([2.0, 3.0, 4.0, 0.0]), torch.tensor([7, 5, 7, 5]))
    assert tokens_S.tolist() == [6.0, 3.0, 6.0, 3.0]


def test_one_sequence_per_episode_is_gspo_token_to_the_bit() -> None:
    objective = Objective()
    for seed in range(10):
        case = random_case(Random(seed), objective, episodes=False)
        parts = [list(range(len(case.sequences)))]
        with_episodes = fast_loss(objective, case, parts)
        without = fast_loss(objective, case, parts, episode_ids_S=None)
        assert with_episodes.loss == without.loss
        assert with_episodes.by_logprob == without.by_logprob


def test_the_statistics_of_an_episodes_sequences_count_each_token_once() -> None:
    zeros_T = torch.zeros(5)
    output = gspo_loss(
        zeros_T,
        zeros_T,
        zeros_T,
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1, 1]),
        num_sequences=1,
        clip_range=clip_range(torch.zeros(2), eps_low=3e-4, eps_high=4e-4),
        episode_ids_S=torch.tensor([4, 4]),
    )
    assert output.stats.num_tokens_S.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregation": "token"}, "num_tokens is missing with aggregation 'token'"),
        ({"aggregation": "constant"}, "length is missing with aggregation 'constant'"),
        ({"num_tokens": 8}, "num_tokens is 8 with aggregation 'sequence'; only 'token'"),
        ({"aggregation": "token", "num_tokens": 8, "length": 4}, "length is 4 with aggregation 'token'; only 'constant'"),
        ({"aggregation": "token", "num_tokens": 0}, "num_tokens is 0"),
        ({"aggregation": "constant", "length": 0}, "length is 0"),
    ],
)
def test_a_divisor_that_is_missing_or_of_another_aggregation_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Reduction(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregation": "constant"}, "aggregation_tokens is not set; set it to the length"),
        ({"aggregation_tokens": 64}, "an objective has one aggregation.*or set aggregation = 'constant'"),
        ({"aggregation": "token", "aggregation_tokens": 64}, "aggregation 'token': an objective has one aggregation"),
        ({"aggregation": "constant", "aggregation_tokens": 0}, r"aggregation_tokens is 0; give a finite number in \[1"),
        ({"aggregation": "mean"}, "choose one of sequence, token, constant"),
    ],
)
def test_an_objective_with_several_aggregations_is_refused_with_the_way_out(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**fields)  # type: ignore[arg-type]


def test_numbers_of_the_micro_batch_instead_of_the_step_are_refused() -> None:
    zeros_T = torch.zeros(5)
    arguments = (zeros_T, zeros_T, zeros_T, torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 2]))
    bounds = clip_range(torch.zeros(3), eps_low=3e-4, eps_high=4e-4)
    episodes_S = torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="num_tokens is 4 but this micro-batch alone has 5 action tokens"):
        gspo_loss(*arguments, num_sequences=3, clip_range=bounds, reduction=Reduction(aggregation="token", num_tokens=4))
    with pytest.raises(ValueError, match="num_sequences is 1 but this micro-batch alone has 2 episodes"):
        gspo_loss(*arguments, num_sequences=1, clip_range=bounds, episode_ids_S=episodes_S)
    with pytest.raises(ValueError, match=r"episode_ids_S\[1\] is -1"):
        gspo_loss(*arguments, num_sequences=3, clip_range=bounds, episode_ids_S=torch.tensor([0, -1, 1]))
    with pytest.raises(ValueError, match=r"tokens_per_sequence_S\[1\] is 2 but"):
        gspo_loss(
            *arguments,
            num_sequences=2,
            clip_range=bounds,
            episode_ids_S=episodes_S,
            tokens_per_sequence_S=torch.tensor([2, 2, 3]),
        )
