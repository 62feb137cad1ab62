"""Shows a run while it runs: a live table on a terminal, one line per event elsewhere."""

import math
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.console import PlainConsole
from services.cli.run.supervisor import Child
from services.runtime.plain_text import one_line

BAR_WIDTH: Final = 40
MOST_CHARACTERS: Final = 300
"""Of a text that a process said: more would push the rest of the table off the screen."""


class Display:
    """Shows the run's status again and again. Use as a context manager."""

    def __init__(self, console: PlainConsole, directory: str, *, plain: bool) -> None:
        self._console = console
        self._directory = directory
        self._live = None if plain or not console.is_terminal else Live(console=console, refresh_per_second=4)
        self._seen: tuple[Any, ...] = ()

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> None:
        """Show the broker's ``status``; None while the broker does not answer."""
        if self._live is not None:
            self._live.update(_render(self._directory, status, children, elapsed_s))
        else:
            self._print_changes(status, children, elapsed_s)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, soft_wrap=True)

    def _print_changes(self, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> None:
        key: tuple[Any, ...]
        if status is None:
            key = ("starting", *(child.state for child in children))
            line = "starting: " + ", ".join(f"{child.spec.name} {child.state}" for child in children)
        else:
            serving = sum(rollout["status"] == "serving" for rollout in status["rollouts"])
            key = (
                status["batches_trained"],
                status["eval_policy_version"],
                serving,
                status["stopping"],
                status["groups"]["set_aside"],
            )
            line = _line(status, serving)
        if key != self._seen:
            self._seen = key
            self._console.print(f"[{elapsed_s:6.1f} s] {line}", soft_wrap=True)


def _line(status: dict[str, Any], serving: int) -> str:
    return (
        f"batch {status['batches_trained']}/{status['batches_total']}  version {status['policy_version']}  "
        f"reward {number(status['train_reward'])}  held-out {number(status['eval_reward'])}  "
        f"lag {number(status['lag_mean'])}  {number(status['tokens_per_s'], 0)} tokens/s  "
        f"rollouts serving {serving}  {_aside(status)}{status['waiting_for'] or ''}{status['stopping'] or ''}"
    )


def _aside(status: dict[str, Any]) -> str:
    num_groups = status["groups"]["set_aside"]
    return f"{num_groups} groups set aside  " if num_groups else ""


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none yet."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _render(directory: str, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row(Text("GSPO run", style="bold"), one_line(directory, MOST_CHARACTERS), f"{elapsed_s:.0f} s")
    parts: list[RenderableType] = [head]
    if status is not None:
        parts.append(_progress(status))
    parts.append(_processes(status, children))
    return Group(*parts)


def _progress(status: dict[str, Any]) -> Table:
    done, total = status["batches_trained"], status["batches_total"]
    filled = round(BAR_WIDTH * done / total)
    grid = Table.grid(padding=(0, 2))
    grid.add_row("batches", Text("━" * filled, style="green") + Text("─" * (BAR_WIDTH - filled)), f"{done}/{total}")
    grid.add_row("reward", f"{number(status['train_reward'])} training", f"{number(status['eval_reward'])} held out")
    grid.add_row("lag", f"{number(status['lag_mean'], 2)} mean", f"{status['lag_max']} largest")
    grid.add_row("speed", f"{number(status['tokens_per_s'], 0)} tokens/s", f"policy version {status['policy_version']}")
    groups = status["groups"]
    grid.add_row(
        "groups",
        f"{groups['open']} open, {groups['complete']} ready",
        f"{groups['dropped']} dropped, {groups['set_aside']} set aside",
    )
    end = one_line(status["stopping"] or status["error"] or "", MOST_CHARACTERS)
    grid.add_row("waiting", one_line(status["waiting_for"] or "-", MOST_CHARACTERS), end)
    return grid


def _processes(status: dict[str, Any] | None, children: Sequence[Child]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for heading in ("process", "state", "pid", "restarts", "doing"):
        table.add_column(heading)
    rollouts = {} if status is None else {rollout["peer"]: rollout for rollout in status["rollouts"]}
    for child in children:
        doing = ""
        rollout = rollouts.get(child.spec.name)
        if rollout is not None:
            doing = f"{rollout['status']}, version {rollout['policy_version']}, {rollout['leases']} episodes"
        row = (child.spec.name, child.state, "-" if child.pid is None else child.pid, child.num_restarts, doing)
        table.add_row(*(one_line(cell, MOST_CHARACTERS) for cell in row))
    return table
