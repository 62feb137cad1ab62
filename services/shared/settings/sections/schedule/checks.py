"""Refuses schedules that would give a setting an invalid value in any batch."""

from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from pydantic import ValidationError

from gspo_services.shared.settings.sections.learner import Learner
from gspo_services.shared.settings.sections.objective import ObjectiveSettings
from gspo_services.shared.settings.sections.run import Run, Sampling
from gspo_services.shared.settings.sections.schedule.curve import Schedule, value_at
from gspo_services.shared.settings.sections.schedule.section import ScheduleSection

WHOLE: Final = ("max_turn_tokens", "max_tokens")
"""Settings that count tokens: their curves are rounded to the nearest whole number."""
SCHEDULED: Final = {
    "max_turn_tokens": "sampling.max_turn_tokens",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "learning_rate": "learner.learning_rate",
    "eps_low": "objective.eps_low",
    "eps_high": "objective.eps_high",
}
"""The setting that each key of the section changes."""
MOST_CHECKED: Final = 1000
"""Beside all batches where a curve turns, so many between them: limits are compared with each other."""


class ScheduledSections(Protocol):
    """The sections of a configuration that schedules affect."""

    @property
    def run(self) -> Run: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def learner(self) -> Learner: ...
    @property
    def objective(self) -> ObjectiveSettings: ...
    @property
    def schedule(self) -> ScheduleSection: ...


class Scheduled(NamedTuple):
    """The values of the settings that can be scheduled, in one batch."""

    max_turn_tokens: int
    max_tokens: int
    temperature: float
    learning_rate: float
    eps_low: float
    eps_high: float

    @classmethod
    def of(cls, settings: ScheduledSections, batch: int) -> "Scheduled":
        """Return the values in ``batch``."""
        schedule, sampling, objective = settings.schedule, settings.sampling, settings.objective
        most = settings.run.num_batches
        return cls(
            round(value_at(schedule.max_turn_tokens, batch, sampling.max_turn_tokens, most)),
            round(value_at(schedule.max_tokens, batch, sampling.max_tokens, most)),
            value_at(schedule.temperature, batch, sampling.temperature, most),
            value_at(schedule.learning_rate, batch, settings.learner.learning_rate, most),
            value_at(schedule.eps_low, batch, objective.eps_low, most),
            value_at(schedule.eps_high, batch, objective.eps_high, most),
        )


def curves(settings: ScheduledSections) -> dict[str, Schedule]:
    """Return the schedules that the settings have, by key."""
    found = {name: getattr(settings.schedule, name) for name in SCHEDULED}
    return {name: curve for name, curve in found.items() if curve is not None}


def critical_batches(settings: ScheduledSections) -> list[int]:
    """Return batches of the run with every extreme of every schedule, and some between them."""
    num_batches = settings.run.num_batches
    turns = set(range(0, num_batches, -(-num_batches // MOST_CHECKED)))
    for curve in curves(settings).values():
        turns |= curve.turning_batches(num_batches)
    return sorted(turns)


def require_schedules(settings: ScheduledSections) -> None:
    """Raises: ValueError with the batch, the value and what to do, for a value that a setting cannot have."""
    found = curves(settings)
    if not found:
        return
    for name, curve in found.items():
        _require_curve(name, curve, settings)
    if "learning_rate" in found and settings.learner.warmup_steps:
        raise ValueError(
            f"learner.warmup_steps is {settings.learner.warmup_steps} but schedule.learning_rate is set, which has its own "
            "warm-up, in batches: set learner.warmup_steps = 0, and warmup in the schedule"
        )
    if settings.objective.adaptive_clip_target is not None and found.keys() & {"eps_low", "eps_high"}:
        raise ValueError(
            f"objective.adaptive_clip_target is {settings.objective.adaptive_clip_target} and the clip width is scheduled: "
            "one adapts the width to what is clipped, the other sets it by the batch. Remove one of them"
        )
    for batch in critical_batches(settings):
        _require_values(settings, batch)


def _require_curve(name: str, curve: Schedule, settings: ScheduledSections) -> None:
    key = f"schedule.{name}"
    if curve.warmup and name != "learning_rate":
        raise ValueError(f"{key}.warmup is {curve.warmup}: only a learning rate warms up; use shape linear, start and end")
    changes = curve.shape in ("linear", "cosine") or curve.decay is not None
    if changes and curve.to is None and name != "learning_rate":
        raise ValueError(f"{key}.to is not set: give the value at the end, as {SCHEDULED[name]} has no 0")
    for value in (*(value for _, value in curve.steps), *(() if curve.to is None else (curve.to,))):
        if name in WHOLE and not float(value).is_integer():
            raise ValueError(f"{key} has the value {value}: {SCHEDULED[name]} counts tokens; give whole numbers")
    start, end = curve.bounds(settings.run.num_batches)
    if curve.shape != "steps" and changes and not max(0, curve.warmup) <= start < end:
        raise ValueError(
            f"{key} changes from batch {start} to batch {end}, with a warm-up of {curve.warmup}: give a start and an end "
            f"(by default run.num_batches, which is {settings.run.num_batches}) that leave room for each part"
        )


def _require_values(settings: ScheduledSections, batch: int) -> None:
    values = Scheduled.of(settings, batch)
    try:
        limits = {name: getattr(values, name) for name in ("max_turn_tokens", "max_tokens", "temperature")}
        type(settings.sampling).model_validate(settings.sampling.model_dump() | limits)
        replace(settings.objective, eps_low=values.eps_low, eps_high=values.eps_high)
    except ValidationError as error:
        details = error.errors()[0]
        where = ".".join(str(part) for part in details["loc"])
        text = details["msg"].removeprefix("Value error, ")
        own = f"sampling.{where} would be {limits[where]!r}: {text}" if where in limits else text
        raise ValueError(f"schedule, batch {batch}: {own}") from error
    if values.learning_rate <= 0:
        raise ValueError(
            f"schedule, batch {batch}: learner.learning_rate would be {values.learning_rate:g}: it must be above 0; give "
            "schedule.learning_rate.to a small value, or an end that is not before run.num_batches"
        )
    buffer = settings.objective.overlong_buffer_tokens
    if buffer is not None and buffer > values.max_tokens:
        raise ValueError(
            f"schedule, batch {batch}: objective.overlong_buffer_tokens is {buffer} and sampling.max_tokens would be "
            f"{values.max_tokens}: lower the first, or let the schedule stay above it"
        )
