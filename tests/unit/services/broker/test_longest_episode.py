"""A broker takes what groups under way may send, also when the run goes on with shorter lengths."""

import pytest

from gspo_protocol.messages import GroupSampling
from gspo_services.broker.entry import _longest_episode
from gspo_services.broker.rows import GroupRow, LedgerContents
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

UNDER_WAY = LedgerContents(
    groups=(
        GroupRow(
            group_id=7, split="train", prompt=7, task_index=7, evaluation=None, status="open",
            sampling=GroupSampling(1.0, 100, 900, 5000),
        ),
    )
)  # fmt: skip


def settings(max_total_tokens: int, max_tokens: int) -> Settings:
    own = {"rollout": {"max_total_tokens": max_total_tokens}, "sampling": {"max_tokens": max_tokens}}
    return Settings.model_validate(own | {"schedule": {"max_tokens": {"steps": [[3, 2 * max_tokens]]}}})


def test_the_longest_of_all_batches_and_of_all_groups_under_way_is_taken() -> None:
    assert _longest_episode(settings(9000, 300), LedgerContents(), ()) == 600
    assert _longest_episode(settings(9000, 300), UNDER_WAY, ()) == 5000
    assert _longest_episode(settings(9000, 4000), UNDER_WAY, ()) == 8000


def test_a_cache_that_a_group_under_way_does_not_fit_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"is 899, and group 7, .* may have 900 tokens.*Raise the first until"):
        _longest_episode(settings(899, 300), UNDER_WAY, ())
