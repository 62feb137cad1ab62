"""What happens to the processes and the disk of a run: kills, suspensions, a full disk, flipped bits. One seed, one plan."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from benchmarks.random_kills.memory import role_of
from tests.support.processes.small_disk import SmallDisk

ROLES: Final = ("broker", "learner", "agent", "scheduler")
BREAK_S: Final = 30.0
"""Between the end of one event and the next, on average: a run recovers from several at once too, but slower."""
SUSPENDED_S: Final = (2.0, 10.0)
FULL_S: Final = (4.0, 12.0)
LEFT_BYTES: Final = (0, 4096, 65_536)
WEIGHTS: Final = {"suspend": 8, "kill": 4, "terminate": 1, "fill the disk": 3, "flip a bit": 4, "damage the newest": 1}


@dataclass(frozen=True)
class Event:
    """What happened, when (seconds since the storm's start), and to whom."""

    time_s: float
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.time_s:6.0f} s  {self.kind}: {self.detail}"


@dataclass
class Weather:
    """Does one thing after another to the processes below ``root`` and to the disk with the run's directory."""

    root: psutil.Process
    directory: Path
    disk: SmallDisk
    rng: random.Random
    wait: Callable[[float], None]
    """Waits, and looks after what has to be looked after meanwhile."""
    events: list[Event] = field(default_factory=list)

    def blow(self, seconds: float) -> Iterator[Event]:
        """Yield each event once it is over."""
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < seconds:
            kind = self.rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
            detail = self._do(kind)
            if detail:
                event = Event(now, kind, detail)
                self.events.append(event)
                yield event
            self.wait(min(self.rng.expovariate(1 / BREAK_S), 4 * BREAK_S))

    def _do(self, kind: str) -> str:
        """Do it; returns what was done, or nothing if it could not be."""
        match kind:
            case "suspend":
                return self._suspend()
            case "kill":
                return self._signal(signal.SIGKILL)
            case "terminate":
                return self._signal(signal.SIGTERM)
            case "fill the disk":
                return self._fill()
            case "flip a bit":
                return self._flip(self._checkpoints()[:-1])
            case _:
                damaged = self._flip(self._checkpoints()[-1:])
                return damaged and f"{damaged}; {self._signal(signal.SIGKILL, 'learner') or 'no learner to kill'}"

    def _process(self, wanted: str) -> psutil.Process | None:
        found = []
        for process in self.root.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if role_of(" ".join(process.cmdline())) == wanted:
                    found.append(process)
        return self.rng.choice(found) if found else None

    def _suspend(self) -> str:
        wanted = self.rng.choice(ROLES)
        process = self._process(wanted)
        if process is None:
            return ""
        seconds = self.rng.uniform(*SUSPENDED_S)
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            self.wait(seconds)
            process.resume()
        return f"{wanted} for {seconds:.1f} s"

    def _signal(self, number: signal.Signals, wanted: str = "") -> str:
        wanted = wanted or self.rng.choice(ROLES)
        process = self._process(wanted)
        if process is None:
            return ""
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        return f"{number.name} to the {wanted}"

    def _fill(self) -> str:
        seconds, left = self.rng.uniform(*FULL_S), self.rng.choice(LEFT_BYTES)
        self.disk.fill(left)
        self.wait(seconds)
        self.disk.empty()
        return f"{left} bytes left for {seconds:.1f} s"

    def _checkpoints(self) -> list[Path]:
        return sorted(self.directory.glob("checkpoints/version-*"))

    def _flip(self, checkpoints: list[Path]) -> str:
        """Flip one bit of one file of one of these."""
        with suppress(OSError):  # The learner removes checkpoints meanwhile.
            files = [path for checkpoint in checkpoints for path in sorted(checkpoint.rglob("*")) if path.is_file()]
            path = self.rng.choice(files)
            place = self.rng.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(place)
                value = file.read(1)[0] ^ (1 << self.rng.randrange(8))
                file.seek(place)
                file.write(bytes([value]))
            return f"bit in byte {place} of {path.relative_to(self.directory)}"
        return ""
