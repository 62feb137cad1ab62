"""Which process has how much of a GPU's memory, while which side of a run has the device."""

from __future__ import annotations

import subprocess
import threading
from collections import defaultdict
from pathlib import Path

import psutil

from gspo_services.shared.colocate import LOCK_FILE

QUERY = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
PERIOD_S = 0.5


def used_mib() -> dict[str, int]:
    """MiB of the device by process: "learner", "server" for SGLang's, "other". Empty where there is no GPU."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    used: dict[str, int] = defaultdict(int)
    for line in answer.splitlines():
        pid, _, mib = line.partition(", ")
        used[_name(int(pid))] += int(mib)
    return used


def _name(pid: int) -> str:
    try:
        words = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return "other"
    return "server" if "sglang" in words else "learner" if "learner" in words else "other"


class MemoryWatch:
    """Samples ``used_mib`` until it is left. ``found``: the least and the most of each process, by holder of the device."""

    def __init__(self, directory: Path) -> None:
        self._lock = directory / LOCK_FILE
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._ranges: dict[tuple[str, str], tuple[int, int]] = {}

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def found(self) -> dict[str, list[int]]:
        """By "process, while holder": the least and the most MiB. Without a lock file the holder is "nobody"."""
        return {f"{process}, while {holder}": list(both) for (process, holder), both in sorted(self._ranges.items())}

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            holder, used = self._holder(), used_mib()
            if self._holder() != holder:
                continue
            for process, mib in used.items():
                least, most = self._ranges.get((process, holder), (mib, mib))
                self._ranges[process, holder] = min(least, mib), max(most, mib)

    def _holder(self) -> str:
        return (self._lock.read_text(errors="replace") if self._lock.exists() else "") or "nobody"
