"""The section of the schedules."""

from gspo_services.shared.settings.sections.schedule.curve import Schedule
from gspo_services.shared.settings.sections.section import Section


class ScheduleSection(Section):
    """Settings that change during a run, by batch: docs/guide/schedules.md has the forms and examples. Each key names the
    setting that it changes, whose own value comes first."""

    max_turn_tokens: Schedule | None = None
    """Changes sampling.max_turn_tokens, for groups that start from then on."""
    max_tokens: Schedule | None = None
    """Changes sampling.max_tokens, for groups that start from then on."""
    temperature: Schedule | None = None
    """Changes sampling.temperature, for groups that start from then on. The learner divides the logits of each group by the
    temperature that it was sampled with."""
    learning_rate: Schedule | None = None
    """Changes learner.learning_rate, which all mini-batches of a batch share. Needs learner.warmup_steps = 0, because the
    schedule has its own warm-up, in batches."""
    eps_low: Schedule | None = None
    """Changes objective.eps_low."""
    eps_high: Schedule | None = None
    """Changes objective.eps_high."""
