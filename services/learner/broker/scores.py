"""Scores of versions on the held-out tasks, as the broker reports them."""

from collections.abc import Mapping

from gspo_protocol.messages import Evaluated


def updated_scores(scores: Mapping[int, float | None], news: Evaluated) -> Mapping[int, float | None]:
    """``scores`` with ``news``: the mean reward by policy version, None while it is evaluated. A version of which no task
    finished has no score."""
    found = dict(scores)
    for score in news.scores:
        if score.under_way or score.reward is not None:
            found[score.policy_version] = None if score.under_way else score.reward
        else:
            found.pop(score.policy_version, None)
    return found
