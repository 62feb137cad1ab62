"""What the schedules of a run give each batch: how its groups are sampled, and what it is trained with."""

from services.schedules.run_schedules import RunSchedules, sampling_of

__all__ = ["RunSchedules", "sampling_of"]
