"""``gspo doctor``: looks at a run from outside and says what is wrong and what to do."""

from gspo_services.cli.doctor.command import doctor_command

__all__ = ["doctor_command"]
