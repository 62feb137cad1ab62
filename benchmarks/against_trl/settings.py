"""What each system is tried with, on top of the common configuration."""

from datetime import datetime
from typing import Final

OURS: Final[dict[str, list[str]]] = {
    "2 servers": [],
    "1 server": ["rollout.num_servers=1", "rollout.max_running=128"],
}
"""Settings of this project: the example as it is, or one SGLang server for all samples, beside the learner."""

THEIRS: Final[dict[str, int]] = {"1 thread": 1, "2 threads": 2}
"""Threads of TRL's process."""

TIMEOUT_S: Final = 1800.0
"""Of one run."""


def say(text: str) -> None:
    """Progress, on the terminal."""
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)
