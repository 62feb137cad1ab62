"""What holds for all tests."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.support.processes.leftovers",
    "tests.support.processes.session_logging",
    "tests.support.postgres.fixtures",
]

# The same examples every time, however slow the machine: what fails is what the last change brought. Random search has
# programs of its own (`make fuzz`, `make test-soak`).
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Processes are started with ``-P``, so the working directory is not on their path: modules of tests/ are found by this.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
