"""Settings that change during a run: the section ``schedule``, its curves, and their checks."""

from gspo_services.shared.settings.sections.schedule.checks import (
    SCHEDULED,
    Scheduled,
    critical_batches,
    curves,
    require_schedules,
)
from gspo_services.shared.settings.sections.schedule.curve import Schedule, value_at
from gspo_services.shared.settings.sections.schedule.section import ScheduleSection

__all__ = [
    "SCHEDULED",
    "Schedule",
    "ScheduleSection",
    "Scheduled",
    "critical_batches",
    "curves",
    "require_schedules",
    "value_at",
]
