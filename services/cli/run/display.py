"""Shows a run while it runs: a live table on a terminal, one line per event elsewhere."""

import math
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.run.supervisor import Child

BAR_WIDTH: Final = 40


class Display:
    """Shows the run's status again and again. Use as a context manager."""

    def __init__(self, console: Console, directory: str, *, plain: bool) -> None:
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
        self._console.print(Text(text))

    def _print_changes(self, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> None:
        key: tuple[Any, ...]
        if status is None:
            key = ("starting", *(child.state for child in children))
            line = "starting: " + ", ".join(f"{child.spec.name} {child.state}" for child in children)
        else:
            serving = sum(rollout["status"] == "serving" for rollout in status["rollouts"])
            key = (status["batches_trained"], status["eval_policy_version"], serving, status["stopping"])
            line = _line(status, serving)
        if key != self._seen:
            self._seen = key
            self._console.print(Text(f"[{elapsed_s:6.1f} s] {line}"), soft_wrap=True)


def _line(status: dict[str, Any], serving: int) -> str:
    return (
        f"batch {status['batches_trained']}/{status['batches_total']}  version {status['policy_version']}  "
        f"reward {number(status['train_reward'])}  held-out {number(status['eval_reward'])}  "
        f"lag {number(status['lag_mean'])}  {number(status['tokens_per_s'], 0)} tokens/s  "
        f"rollouts serving {serving}  {status['waiting_for'] or ''}{status['stopping'] or ''}"
    )


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none yet."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _render(directory: str, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row(Text("GSPO run", style="bold"), directory, f"{elapsed_s:.0f} s")
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
    grid.add_row("groups", f"{groups['open']} open, {groups['complete']} ready", f"{groups['dropped']} dropped")
    grid.add_row("waiting", status["waiting_for"] or "-", status["stopping"] or status["error"] or "")
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
        table.add_row(
            child.spec.name, child.state, str(child.pid if child.pid is not None else "-"), str(child.num_restarts), doing
        )
    return table
