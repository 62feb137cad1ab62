"""Computes what k of n samples would have shown: pass@k, and the vote of k samples. Exact, by counting subsets."""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that at least one of k samples, drawn without replacement from these, is solved.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of 1 - (1 - p)^k (Chen et al. 2021, arXiv 2107.03374, section 2.1), as a
    product, because the binomials overflow a float. Raises: ValueError for k outside 1 .. n, c outside 0 .. n.
    """
    _require(num_samples, k)
    if not 0 <= num_solved <= num_samples:
        raise ValueError(f"{num_solved} of {num_samples} samples are solved: expected 0 to {num_samples}")
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_solved + 1, num_samples + 1))


def majority_at_k(answers: Sequence[str | None], solved: Sequence[bool], k: int) -> float:
    """Return the expected score of the most frequent answer among k samples, drawn without replacement (maj@k).

    The voting of Wang et al. 2022 (arXiv 2203.11171), averaged over all C(n, k) subsets instead of one. Of several answers
    with the most votes, one is chosen at random: each counts its share. A sample without an answer (None) has no vote, and
    a subset without a vote scores 0. Samples with the same answer that were graded differently count the share of them that
    is solved. Raises: ValueError for k outside 1 .. n, or lists of different lengths.
    """
    _require(len(answers), k)
    if len(solved) != len(answers):
        raise ValueError(f"{len(answers)} answers and {len(solved)} grades: expected one grade for each")
    counts = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, is_solved in zip(answers, solved, strict=True) if is_solved and answer is not None)
    if k == len(answers):  # One subset.
        most = max(counts.values(), default=0)
        first = [answer for answer, count in counts.items() if count == most]
        return float(sum((Fraction(right[answer], most) for answer in first), Fraction()) / max(1, len(first)))
    abstaining = len(answers) - counts.total()
    won = Fraction()
    for answer, num_right in right.items():
        others = list((counts - Counter({answer: counts[answer]})).values())
        won += Fraction(num_right, counts[answer]) * _won(counts[answer], others, abstaining, k)
    return float(won / math.comb(len(answers), k))


def _won(own: int, others: Sequence[int], abstaining: int, k: int) -> Fraction:
    """Subsets of k samples in which the answer with ``own`` samples has the most votes; one of t + 1 where t others have as
    many."""
    won = Fraction()
    for votes in range(1, min(own, k) + 1):
        # ways[t, m]: ways in which the other answers have m votes together, none more than ``votes`` and t of them as many.
        ways = {(0, 0): 1}
        for count in others:
            ways = _with_answer(ways, count, votes, k - votes)
        for (num_tied, num_votes), number in ways.items():
            silent = math.comb(abstaining, k - votes - num_votes)
            won += Fraction(number * math.comb(own, votes) * silent, num_tied + 1)
    return won


def _with_answer(ways: dict[tuple[int, int], int], count: int, votes: int, most: int) -> dict[tuple[int, int], int]:
    """Add one more answer with ``count`` samples to ``ways``; ``most``: votes that all others may have together."""
    found: dict[tuple[int, int], int] = {}
    for (num_tied, num_votes), number in ways.items():
        for new in range(min(count, votes, most - num_votes) + 1):
            key = (num_tied + (new == votes), num_votes + new)
            found[key] = found.get(key, 0) + number * math.comb(count, new)
    return found


def _require(num_samples: int, k: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}: expected at least 1")
    if k > num_samples:
        raise ValueError(f"k is {k}, and there are {num_samples} samples: take more samples, or a k up to {num_samples}")
