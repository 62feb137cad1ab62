"""The environment ``code``: programs scored by hidden tests, of standard input or of a function."""

from __future__ import annotations

from gspo_services.tasks.environments.coding.environment import ProgramEnvironment


class Code(ProgramEnvironment):
    """One problem, one program; 1 when it passes all tests, or the share that it passes."""
