"""The options of the reward workers, from the configuration and this process's environment."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import RewardSection
from gspo_services.tasks.environments import RewardPoolOptions


def reward_pool_options(settings: RewardSection, environment: Mapping[str, str]) -> RewardPoolOptions:
    """Make the options from ``settings``; values of variables come from ``environment``.

    Raises: ConfigurationError when a variable is not set there.
    """
    missing = [name for name in settings.variables if name not in environment]
    if missing:
        raise ConfigurationError(
            f"reward.variables names {', '.join(missing)}, which this process's environment lacks: set it where the rollout "
            "is started, or leave it out"
        )
    return RewardPoolOptions(
        num_workers=settings.workers,
        memory_bytes=settings.memory_bytes,
        cpu_s=settings.cpu_s,
        on_deadline=settings.on_deadline,
        network=settings.network,
        scratch=settings.scratch,
        environment={name: environment[name] for name in settings.variables},
    )
