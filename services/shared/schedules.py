"""The values that the settings give each batch, as the broker records them."""

from gspo_protocol.messages import GroupSampling, TrainingValues
from gspo_services.shared.settings import Sampling, Settings, value_at


class RunSchedules:
    """The schedules of one run. Pure: the same settings and batch give the same values."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def sampling_at(self, batch: int) -> GroupSampling:
        """Return how to sample a group that starts for ``batch``."""
        sampling, schedule, most = self._settings.sampling, self._settings.schedule, self._settings.run.num_batches
        max_tokens = round(value_at(schedule.max_tokens, batch, sampling.max_tokens, most))
        whole = sampling.max_episode_tokens
        return GroupSampling(
            temperature=float(value_at(schedule.temperature, batch, sampling.temperature, most)),
            max_turn_tokens=round(value_at(schedule.max_turn_tokens, batch, sampling.max_turn_tokens, most)),
            max_tokens=max_tokens,
            max_episode_tokens=max_tokens if whole is None else whole,
        )

    def training_at(self, batch: int) -> TrainingValues:
        """Return the scheduled values for training ``batch``."""
        schedule, objective, most = self._settings.schedule, self._settings.objective, self._settings.run.num_batches
        rate = self._settings.learner.learning_rate
        return TrainingValues(
            learning_rate=None if schedule.learning_rate is None else value_at(schedule.learning_rate, batch, rate, most),
            eps_low=None if schedule.eps_low is None else value_at(schedule.eps_low, batch, objective.eps_low, most),
            eps_high=None if schedule.eps_high is None else value_at(schedule.eps_high, batch, objective.eps_high, most),
        )


def sampling_of(sampling: Sampling) -> GroupSampling:
    """Return the section ``sampling`` as it stands, without schedules."""
    return GroupSampling(
        temperature=sampling.temperature,
        max_turn_tokens=sampling.max_turn_tokens,
        max_tokens=sampling.max_tokens,
        max_episode_tokens=sampling.episode_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
