"""An agent's module whose process is killed while it is imported, as often as the file KILLS has bytes."""

import os
from pathlib import Path

from gspo.tasks.agents import Episode

_KILLS = Path(os.environ.get("KILLS", os.devnull))
if left := _KILLS.read_bytes():
    _KILLS.write_bytes(left[1:])
    os.kill(os.getpid(), 9)


async def solve(_: Episode) -> float:
    return 1.0
