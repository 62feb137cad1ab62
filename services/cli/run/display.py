"""Shows a run while it runs: a live table on a terminal, one line per event elsewhere, or only problems."""

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gspo_services.cli.run.happenings import Happening
from gspo_services.cli.run.processes import TRACKER_PREFIX
from gspo_services.cli.run.progress import RunProgress, duration, pass_rates
from gspo_services.cli.run.supervisor import Child
from gspo_services.runs.track import Cursor, Sample
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.plain_text import one_line

Look = Literal["live", "plain", "quiet"]

BAR_WIDTH: Final = 40
LEAST_BAR: Final = 8
WIDE: Final = 80
"""On a narrower terminal the table of processes has fewer columns."""
REMIND_S: Final = 15.0
"""While processes start, lines say at least so often what they do."""
MOST_CHARACTERS: Final = 300
"""The most characters quoted from a process: more would push the rest of the table off the screen."""


class Display:
    """Shows the run's status repeatedly. Use as a context manager."""

    def __init__(self, console: PlainConsole, directory: str, *, look: Look) -> None:
        """``look``: live (a table, where ``console`` is a terminal), plain (lines), quiet (problems only)."""
        self._console = console
        self._directory = directory
        self._quiet = look == "quiet"
        live = look == "live" and console.is_terminal
        # Lines that this process logs go above the table.
        self._live = Live(console=console, refresh_per_second=4) if live else None
        self._seen: tuple[Any, ...] = ()
        self.progress = RunProgress()
        self.cursors: dict[str, Cursor] = {}
        """How far each tracker is, by name."""
        self.sample: Sample | None = None
        self.doing: dict[str, str] = {}
        """What each process does while it starts, by name."""
        self._has_served = False
        self._told_at_s = 0.0
        self.device_holder = ""
        """The process that has the device, where they time-share it; empty: none, or they do not."""

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> None:
        """Show the broker's ``status``; None while the broker does not answer."""
        if status is not None and any(rollout["status"] == "serving" for rollout in status["rollouts"]):
            self._has_served = True
        if self._live is not None:
            self._live.update(self._table(status, children, elapsed_s))
        elif not self._quiet:
            self._print_changes(status, children, elapsed_s)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._console.print(text, soft_wrap=True)

    def tell(self, happening: Happening, elapsed_s: float) -> None:
        """Print a line about an event that matters."""
        if self._quiet and not happening.is_problem:
            return
        mark = "! " if happening.is_problem else ""
        text = f"[{elapsed_s:6.1f} s] {mark}{one_line(happening.text, MOST_CHARACTERS)}"
        self._console.print(Text(text, style="yellow" if happening.is_problem else ""), soft_wrap=True)

    def tell_sample(self, sample: Sample, elapsed_s: float) -> None:
        """Show a prompt and the model's answer."""
        self.sample = sample
        if self._live is None and not self._quiet:
            self._console.print(f"[{elapsed_s:6.1f} s] sample: {sample_line(sample)}", soft_wrap=True)

    def _print_changes(self, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> None:
        key: tuple[Any, ...]
        doing = {child.spec.name: self.doing.get(child.spec.name, "") for child in children}
        if status is None or (not self._has_served and any(doing.values())):
            key = ("starting", *(child.state for child in children), *(bool(each) for each in doing.values()))
            parts = (f"{child.spec.name} {doing[child.spec.name] or child.state}" for child in children)
            line = f"starting: {', '.join(parts)}"
            if elapsed_s - self._told_at_s >= REMIND_S:
                self._seen = ()
        else:
            serving = sum(rollout["status"] == "serving" for rollout in status["rollouts"])
            key = (
                status["batches_trained"],
                status["eval_policy_version"],
                serving,
                status["stopping"],
                status["groups"]["quarantined"],
            )
            line = self._line(status, serving)
        if key != self._seen:
            self._seen, self._told_at_s = key, elapsed_s
            self._console.print(f"[{elapsed_s:6.1f} s] {line}", soft_wrap=True)

    def _line(self, status: dict[str, Any], serving: int) -> str:
        lengths, left_s = self.progress.lengths(), self.progress.seconds_left(status)
        return (
            f"batch {status['batches_trained']}/{status['batches_total']}  version {status['policy_version']}  "
            f"reward {number(status['train_reward'])}  held-out {number(status['eval_reward'])}  "
            f"lag {number(status['lag_mean'])}  {number(status['tokens_per_s'], 0)} tokens/s  "
            f"{f'lengths {lengths}  ' if lengths else ''}{f'ends in {duration(left_s)}  ' if left_s is not None else ''}"
            f"rollouts serving {serving}  {f'device: {self.device_holder}  ' if self.device_holder else ''}"
            f"{_aside(status)}{status['waiting_for'] or ''}{status['stopping'] or ''}"
        )

    def _table(self, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        head.add_row(Text("GSPO run", style="bold"), one_line(self._directory, MOST_CHARACTERS), duration(elapsed_s))
        parts: list[RenderableType] = [head]
        if status is not None:
            parts.append(self._progress(status))
        parts.append(self._processes(status, children))
        return Group(*parts)

    def _progress(self, status: dict[str, Any]) -> Table:
        done, total = status["batches_trained"], status["batches_total"]
        width = max(LEAST_BAR, min(BAR_WIDTH, self._console.width - 44))
        filled = round(width * min(1.0, done / total))
        left_s = self.progress.seconds_left(status)
        grid = Table.grid(padding=(0, 2))
        bar = Text("━" * filled, style="green") + Text("─" * (width - filled))
        grid.add_row("batches", bar, f"{done}/{total}" + (f", ends in {duration(left_s)}" if left_s is not None else ""))
        best = self.progress.best
        held_out = f"{number(status['eval_reward'])} held out" + (
            f", best {best.reward:.3f} at {best.batch}" if best else ""
        )
        grid.add_row("reward", f"{number(status['train_reward'])} training", held_out)
        lengths, _, cut_off = self.progress.lengths().partition("; ")
        grid.add_row("answers", lengths or "-", cut_off)
        rates = pass_rates(self.progress.last_batch)
        if rates:
            grid.add_row("solved", rates, "by how often the tasks were solved before")
        grid.add_row("lag", f"{number(status['lag_mean'], 2)} mean", f"{number(status['lag_max'], 0)} largest")
        grid.add_row("speed", f"{number(status['tokens_per_s'], 0)} tokens/s", f"policy version {status['policy_version']}")
        groups = status["groups"]
        grid.add_row(
            "groups",
            f"{groups['open']} open, {groups['complete']} ready",
            f"{groups['dropped']} dropped, {groups['filtered']} filtered out, {groups['quarantined']} quarantined",
        )
        end = one_line(status["stopping"] or status["error"] or "", MOST_CHARACTERS)
        grid.add_row("waiting", one_line(status["waiting_for"] or "-", MOST_CHARACTERS), end)
        if self.sample is not None:
            text = sample_line(self.sample, self._console.width - 30)
            grid.add_row("sample", text, f"reward {number(self.sample.reward, 2)}")
        return grid

    def _processes(self, status: dict[str, Any] | None, children: Sequence[Child]) -> Table:
        wide = self._console.width >= WIDE
        table = Table(box=None, padding=(0, 2 if wide else 1), pad_edge=wide)
        for heading in ("process", "state", *(("pid", "restarts") if wide else ()), "doing"):
            table.add_column(heading)
        rollouts = {} if status is None else {rollout["peer"]: rollout for rollout in status["rollouts"]}
        for child in children:
            name = child.spec.name
            doing = (
                _tracker_text(self.cursors.get(name.removeprefix(TRACKER_PREFIX))) if name.startswith(TRACKER_PREFIX) else ""
            )
            doing = doing or self.doing.get(name, "")
            rollout = rollouts.get(name)
            if rollout is not None and rollout["status"] == "serving":
                doing = ""
            if rollout is not None and not doing:
                doing = f"{rollout['status']}, version {rollout['policy_version']}, {rollout['leases']} episodes"
            if self.device_holder == name:
                doing = f"{doing}, has the device" if doing else "has the device"
            middle = ("-" if child.pid is None else child.pid, child.num_restarts) if wide else ()
            table.add_row(*(one_line(cell, MOST_CHARACTERS) for cell in (name, child.state, *middle, doing)))
        return table


def sample_line(sample: Sample, most: int = MOST_CHARACTERS) -> str:
    """Return the end of the prompt and the beginning of the answer, in one line of about ``most`` characters."""
    part = max(20, most // 2)
    prompt = one_line(sample.prompt)
    prompt = prompt if len(prompt) <= part else f"...{prompt[-part:]}"
    answer = one_line(sample.answer)
    answer = answer if len(answer) <= part else f"{answer[:part]}..."
    return f"{prompt} -> {answer}  ({sample.num_tokens} tokens{', cut off' * (sample.ended == 'length')})"


def _tracker_text(cursor: Cursor | None) -> str:
    if cursor is None:
        return ""
    if cursor.error:
        return f"refuses: {cursor.error}"
    return f"{cursor.line} lines sent" + (f", {cursor.behind} to go" if cursor.behind else "")


def _aside(status: dict[str, Any]) -> str:
    num_groups = status["groups"]["quarantined"]
    return f"{num_groups} groups quarantined  " if num_groups else ""


def number(value: float | None, digits: int = 3) -> str:
    """Format a number, or a dash if there is none yet."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
