"""The process that draws tasks, when somebody ends it."""

import os
import signal
from contextlib import suppress

import pytest

from gspo_services.shared.runtime.errors import PassingFault
from gspo_services.tasks.gym import GymRefused, GymUndrawn, Library


def test_a_process_that_was_killed_refuses_nothing() -> None:
    library = Library()
    with suppress(GymRefused):  # Where the package is not installed.
        library.version()
    assert library._process is not None
    os.kill(library._process.pid, signal.SIGKILL)
    with pytest.raises(GymUndrawn, match="ended with status -9") as caught:
        library.version()
    assert isinstance(caught.value, PassingFault)
    library.close()
