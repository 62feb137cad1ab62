"""What holds for all tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import gspo
import gspo_protocol
import gspo_services

ROOT = Path(__file__).parents[1]

pytest_plugins = [
    "tests.support.processes.leftovers",
    "tests.support.processes.session_logging",
    "tests.support.postgres.fixtures",
    "tests.support.workers.order",
]

# The same examples every time, however slow the machine: what fails is what the last change brought. Random search has
# programs of its own (`make fuzz`, `make test-soak`).
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Processes are started with ``-P``, so the working directory is not on their path: modules of tests/ are found by this.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# A shell ignores Ctrl-C in what it starts in the background, and what a test starts and interrupts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An environment of another checkout would test that checkout's code.
for package in (gspo, gspo_protocol, gspo_services):
    if not Path(package.__file__).is_relative_to(ROOT):
        raise RuntimeError(f"{package.__name__} is that of {package.__file__}: run `make setup` in {ROOT}")


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Commands change that of their process, which tests share."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
