"""What happens to a run's processes, disks and connections: kills, suspensions, full disks, flipped bits, partitions.

A deck of cards has each of them, those of processes for each kind. It is shuffled and dealt, again and
again: so nothing is left out by chance, and one seed is one plan.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from benchmarks.random_kills.memory import role_of
from tests.storm import network
from tests.support.processes.small_disk import SmallDisk

BREAK_S: Final = 30.0
"""Between the end of one event and the next, on average: a run recovers from several at once too, but slower."""
SUSPENDED_S: Final = (2.0, 10.0)
FULL_S: Final = (4.0, 12.0)
APART_S: Final = (3.0, 20.0)
"""Sometimes longer than a lease."""
LEFT_BYTES: Final = (0, 4096, 65_536)
FIND_S: Final = 5.0
"""A process that was just killed comes back meanwhile."""


@dataclass(frozen=True)
class Card:
    """What happens, and to which kind of process."""

    kind: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.target}".strip()


@dataclass(frozen=True)
class Event:
    """A card that was played, when (seconds since the storm's start), and what was done."""

    time_s: float
    card: Card
    detail: str

    def __str__(self) -> str:
        return f"{self.time_s:6.0f} s  {self.card}: {self.detail}"


def deck(roles: Sequence[str]) -> list[Card]:
    """All that has to happen to a run with these kinds of processes."""
    return [
        *(Card(kind, role) for kind in ("suspend", "kill") for role in roles),
        Card("fill the disk"),
        Card("cut the broker off"),
        Card("terminate"),
        Card("flip a bit"),
        Card("flip a bit"),
        Card("damage the newest"),
    ]


def never_hit(cards: Iterable[Card], events: Iterable[Event]) -> list[str]:
    """The cards of a deck that were not played, or found nobody."""
    played = {event.card for event in events}
    return sorted({str(card) for card in cards if card not in played})


@dataclass
class Weather:
    """Does one thing after another to the processes below ``root``, to ``disk`` and to the broker's ports."""

    root: psutil.Process
    directory: Path
    disk: SmallDisk
    """The run's."""
    ports: tuple[int, int]
    """Where rollouts and where the learner connect to the broker."""
    roles: Sequence[str]
    rng: random.Random
    wait: Callable[[float], None]
    """Waits, and looks after what has to be looked after meanwhile."""
    break_s: float = BREAK_S
    events: list[Event] = field(default_factory=list)

    @property
    def deck(self) -> list[Card]:
        return deck(self.roles)

    def blow(self, seconds: float) -> Iterator[Event]:
        """Yield each event once it is over."""
        begin = time.monotonic()
        cards: list[Card] = []
        while (now := time.monotonic() - begin) < seconds:
            cards = cards or self.rng.sample(self.deck, len(self.deck))
            card = cards.pop()
            detail = self._play(card)
            if detail:
                event = Event(now, card, detail)
                self.events.append(event)
                yield event
            self.wait(min(self.rng.expovariate(1 / self.break_s), 4 * self.break_s))

    def counts(self) -> str:
        """How often each card was played."""
        counted = Counter(str(event.card) for event in self.events)
        return ", ".join(f"{number} x {card}" for card, number in sorted(counted.items()))

    def _play(self, card: Card) -> str:
        """Returns what was done, or nothing if it could not be."""
        match card.kind:
            case "suspend":
                return self._suspend(card.target)
            case "kill":
                return self._signal(signal.SIGKILL, card.target)
            case "terminate":
                return self._signal(signal.SIGTERM, self.rng.choice(self.roles))
            case "fill the disk":
                return self._fill()
            case "cut the broker off":
                return self._cut_off()
            case "flip a bit":
                return self._flip(self._checkpoints()[:-1])
            case _:
                damaged = self._flip(self._checkpoints()[-1:])
                return damaged and f"{damaged}; {self._signal(signal.SIGKILL, 'learner') or 'no learner to kill'}"

    def _process(self, wanted: str) -> psutil.Process | None:
        """One of them; waits a moment for one that is not there yet."""
        until = time.monotonic() + FIND_S
        while True:
            found = []
            for process in self.root.children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if role_of(" ".join(process.cmdline())) == wanted:
                        found.append(process)
            if found or time.monotonic() > until:
                return self.rng.choice(found) if found else None
            self.wait(0.2)

    def _suspend(self, wanted: str) -> str:
        process = self._process(wanted)
        if process is None:
            return ""
        seconds = self.rng.uniform(*SUSPENDED_S)
        try:
            process.suspend()
        except psutil.NoSuchProcess:
            return ""
        with suppress(psutil.NoSuchProcess):
            self.wait(seconds)
            process.resume()
        return f"for {seconds:.1f} s"

    def _signal(self, number: signal.Signals, wanted: str) -> str:
        process = self._process(wanted)
        if process is None:
            return ""
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return ""
        return f"{number.name} to the {wanted}"

    def _fill(self) -> str:
        seconds, left = self.rng.uniform(*FULL_S), self.rng.choice(LEFT_BYTES)
        self.disk.fill(left)
        try:
            self.wait(seconds)
        finally:
            self.disk.empty()
        return f"{left} bytes left for {seconds:.1f} s"

    def _cut_off(self) -> str:
        work, batch = self.ports
        seconds = self.rng.uniform(*APART_S)
        which = self.rng.choice([(work,), (batch,), (work, batch)])
        way: network.Way = self.rng.choice(("drop", "reset"))
        network.cut_off(which, way)
        try:
            self.wait(seconds)
        finally:
            network.join()
        return f"{way} at {which} for {seconds:.1f} s"

    def _checkpoints(self) -> list[Path]:
        return sorted(self.directory.glob("checkpoints/version-*"))

    def _flip(self, checkpoints: list[Path]) -> str:
        """Flip one bit of one file of one of these."""
        with suppress(OSError):  # The learner removes checkpoints meanwhile.
            files = [path for checkpoint in checkpoints for path in sorted(checkpoint.rglob("*")) if path.is_file()]
            if not files:
                return ""
            path = self.rng.choice(files)
            place = self.rng.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(place)
                value = file.read(1)[0] ^ (1 << self.rng.randrange(8))
                file.seek(place)
                file.write(bytes([value]))
            return f"bit in byte {place} of {path.relative_to(self.directory)}"
        return ""
