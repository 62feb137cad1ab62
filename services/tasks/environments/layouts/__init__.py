"""Rows of public sets, as their own loaders read them, and of our own."""

from gspo_services.tasks.environments.layouts.kept_rows import KeptRows
from gspo_services.tasks.environments.layouts.program_rows import ProgramRow
from gspo_services.tasks.environments.layouts.recognition import LAYOUTS, LayoutName, program_row, recognised

__all__ = ["LAYOUTS", "KeptRows", "LayoutName", "ProgramRow", "program_row", "recognised"]
