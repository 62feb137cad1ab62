"""``gspo track`` with a tracker that takes its first point and never comes back: ``python -m ... PIPE ARGUMENTS``."""

import signal
import sys
from typing import Any

from gspo_services.runs.track import command
from gspo_services.runs.track.clients import CLIENTS, Client, TrackerRun


class SleepingTracker:
    """Tells in a named pipe that it sleeps."""

    pipe = ""

    def __init__(self, run: TrackerRun) -> None:
        del run

    def last_line(self) -> int:
        return 0

    def write(self, *_: Any) -> None:
        with open(self.pipe, "w") as file:
            file.write("tracker sleeps\n")
        while True:
            signal.pause()

    def flush(self) -> None:
        """Never called."""

    def close(self) -> None:
        """Never called."""


if __name__ == "__main__":
    SleepingTracker.pipe = sys.argv[1]
    CLIENTS["tensorboard"] = Client(package="json", opener=f"{__name__}:SleepingTracker")
    sys.exit(command.main(sys.argv[2:]))
