"""The processes of a run and the ``gspo`` command."""

from gspo.moved import report_moves
from services.moved import MOVED

report_moves(__name__, MOVED)
