"""``gspo doctor`` and ``gspo stop``: a run observed from outside."""

from services.cli.watching.doctor import doctor_command
from services.cli.watching.stop import stop_command

__all__ = ["doctor_command", "stop_command"]
