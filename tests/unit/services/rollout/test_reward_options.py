"""What the configuration says of reward workers becomes their options."""

import pytest

from gspo_services.rollout.reward_options import reward_pool_options
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import RewardSection
from gspo_services.tasks.environments import RewardPoolOptions


def test_every_setting_reaches_the_workers() -> None:
    settings = RewardSection(
        workers=3, memory_bytes=2**30, cpu_s=7, on_deadline="zero", network=True, scratch=True, variables=["KEY"]
    )
    assert reward_pool_options(settings, {"KEY": "secret", "OTHER": "hidden"}) == RewardPoolOptions(
        num_workers=3, memory_bytes=2**30, cpu_s=7, on_deadline="zero", network=True, scratch=True,
        environment={"KEY": "secret"},
    )  # fmt: skip


def test_by_default_reward_code_has_no_network_no_files_and_none_of_our_variables() -> None:
    options = reward_pool_options(RewardSection(), {"KEY": "secret"})
    assert (options.network, options.scratch, options.environment, options.on_deadline) == (False, False, {}, "fail")


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"reward\.variables names A, C, which this process's environment lacks"):
        reward_pool_options(RewardSection(variables=["A", "B", "C"]), {"B": ""})
