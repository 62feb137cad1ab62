"""pass@k and maj@k are what counting every subset gives."""

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from gspo_services.shared.eval_metrics import majority_at_k, pass_at_k


def counted_pass(solved: list[bool], k: int) -> float:
    subsets = list(itertools.combinations(solved, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def counted_majority(answers: list[str | None], solved: list[bool], k: int) -> float:
    """Every subset of samples, each with its vote; the score of an answer is the share of its samples that is solved."""
    worth = {
        answer: Fraction(sum(ok for each, ok in zip(answers, solved, strict=True) if each == answer), answers.count(answer))
        for answer in set(answers)
    }
    total, number = Fraction(), 0
    for subset in itertools.combinations(range(len(answers)), k):
        number += 1
        votes = Counter(answers[place] for place in subset if answers[place] is not None)
        if votes:
            most = max(votes.values())
            winners = [answer for answer, count in votes.items() if count == most]
            total += sum((worth[answer] for answer in winners), Fraction()) / len(winners)
    return float(total / number)


@pytest.mark.parametrize("num_samples", range(1, 10))
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_sample(num_samples: int) -> None:
    for num_solved, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        solved = [True] * num_solved + [False] * (num_samples - num_solved)
        assert pass_at_k(num_samples, num_solved, k) == pytest.approx(counted_pass(solved, k), abs=1e-12)


def test_pass_at_k_is_exact_where_the_binomials_overflow_a_float() -> None:
    from math import comb

    exact = 1 - Fraction(comb(5000 - 7, 600), comb(5000, 600))
    assert pass_at_k(5000, 7, 600) == pytest.approx(float(exact), rel=1e-10)


def test_maj_at_k_is_the_mean_over_all_subsets_with_ties_shared() -> None:
    rng = random.Random(3)
    for _ in range(300):
        num_samples = rng.randint(1, 8)
        answers: list[str | None] = [rng.choice(["a", "b", "c", "d", None]) for _ in range(num_samples)]
        # Also graders that judge one answer in two ways, and answers that are right under two names.
        solved = [rng.random() < {"a": 0.9, "b": 0.5}.get(answer or "", 0.1) for answer in answers]
        for k in range(1, num_samples + 1):
            assert majority_at_k(answers, solved, k) == pytest.approx(counted_majority(answers, solved, k), abs=1e-12)


def test_a_tie_counts_the_share_of_the_right_answers_in_it() -> None:
    assert majority_at_k(["4", "4", "5", "5", "6"], [True, True, False, False, False], 5) == 0.5
    assert majority_at_k([None, None, "4"], [False, False, True], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 1) == 0.0


def test_maj_at_1_is_the_share_of_solved_samples_with_an_answer() -> None:
    assert majority_at_k(["a", "b", None, "a"], [True, False, False, True], 1) == pytest.approx(0.5)


@pytest.mark.parametrize(("k", "text"), [(0, "expected at least 1"), (-2, "expected at least 1"), (5, "take more samples")])
def test_a_k_that_the_samples_do_not_give_is_refused(k: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pass_at_k(4, 1, k)
    with pytest.raises(ValueError, match=text):
        majority_at_k(["a"] * 4, [True] * 4, k)


def test_sixty_four_different_votes_are_counted_in_no_time() -> None:
    answers: list[str | None] = [str(place // 3) for place in range(64)]
    solved = [place // 3 == 5 for place in range(64)]
    assert 0.04 < majority_at_k(answers, solved, 16) < 0.05
