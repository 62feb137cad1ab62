"""A broker under cProfile: where its CPU goes is written beside its configuration when it ends in order.

python -m benchmarks.fleet.profiled_broker CONFIG
"""

import cProfile
import pstats
import sys
import time
from pathlib import Path
from typing import Final

from gspo_services.broker.__main__ import main

PROFILE_FILE: Final = "profile.txt"
LINES: Final = 40

if __name__ == "__main__":
    profile = cProfile.Profile(time.thread_time)  # The event loop's own CPU: waiting does not count.
    try:
        status = profile.runcall(main)
    finally:
        with Path(sys.argv[1]).with_name(PROFILE_FILE).open("w", encoding="utf-8") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(LINES)
    sys.exit(status)
