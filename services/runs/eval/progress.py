"""Shows how far sampling has come: a bar on a terminal, a line every few seconds elsewhere."""

import sys
from types import TracebackType
from typing import Final, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from gspo_services.runs.eval.samples import ScoredSample
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.console import PlainConsole

EVERY_S: Final = 10.0


class SamplingProgress:
    """Shows one model on one set. Use as a context manager."""

    def __init__(self, console: PlainConsole, what: str, *, total: int, known: int, solved_at: float, clock: Clock) -> None:
        """``known``: samples that already exist."""
        self._console, self._what, self._clock = console, what, clock
        self._total, self._known, self._solved_at = total, known, solved_at
        self._new = self._solved = self._failed = self._tokens = 0
        self._begin_s = self._shown_s = clock.now()
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._show()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        self._console.print(self.text(), soft_wrap=True)

    def took(self, sample: ScoredSample) -> None:
        """One more sample is on the disk."""
        self._new += 1
        self._failed += sample.reward is None
        self._solved += sample.reward is not None and sample.reward >= self._solved_at
        self._tokens += sample.num_action_tokens
        now = self._clock.now()
        if self._live is not None or now - self._shown_s >= EVERY_S:
            self._shown_s = now
            self._show()

    def text(self) -> str:
        """Return the number of samples, their results, and the remaining time."""
        parts = [f"{self._what}: {self._known + self._new:,} of {self._total:,} samples"]
        if self._known and not self._new:
            parts.append("taken before")
        if self._new > self._failed:
            parts.append(f"{self._solved / (self._new - self._failed):.0%} solved")
        if self._failed:
            parts.append(f"{self._failed:,} without a reward")
        took_s = self._clock.now() - self._begin_s
        if self._new and took_s > 0:
            parts.append(f"{self._tokens / took_s:,.0f} tokens/s")
            rest = self._total - self._known - self._new
            if rest > 0:
                parts.append(f"about {_duration(rest * took_s / self._new)} left")
        return ", ".join(parts)

    def _show(self) -> None:
        if self._live is None:
            if self._new:
                self._console.print(self.text(), soft_wrap=True)
            return
        table = Table.grid(padding=(0, 1))
        table.add_row(
            ProgressBar(total=self._total, completed=self._known + self._new, width=24),
            self._console.render_str(self.text()),
        )
        self._live.update(table)


def progress_console() -> PlainConsole:
    """Return a console on standard error: standard output has only the results."""
    return PlainConsole(file=sys.stderr)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
