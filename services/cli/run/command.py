"""``gspo run``: all processes on this machine, with live progress and a report at the end."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from gspo_services.cli.operator import Operator, connection
from gspo_services.cli.run.display import Display, Look
from gspo_services.cli.run.news import News
from gspo_services.cli.run.plot import write_plot
from gspo_services.cli.run.processes import process_specs, tracker_specs
from gspo_services.cli.run.report import learning_lines, summary_table
from gspo_services.cli.run.supervisor import ProcessSpec, Supervisor
from gspo_services.prepare.ports import PortClaims, moved_ports
from gspo_services.runs.metrics import read_metrics
from gspo_services.shared.placement import machine_of, placement_of, require_pythons
from gspo_services.shared.runtime.clock import Clock, MonotonicClock
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.shared.runtime.lifecycle import run_process, until_stopped
from gspo_services.shared.runtime.log_files import LogLimits
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.private_files import keep_private
from gspo_services.shared.runtime.stray_processes import kill_orphans
from gspo_services.shared.settings import FETCHED, Settings, forwarded_arguments, load_settings, require_model

log = structlog.get_logger()

REFRESH_S: Final = 1.0
STATUS_TIMEOUT_S: Final = 3.0


def run_command(config: Path, overrides: Sequence[str], *, look: Look) -> int:
    """Run all processes that ``config`` asks for. Returns the exit status."""
    # Logs of this command's own connection to the broker would mix with the lines for people.
    configure_logging("run", usual_level="warning")
    claims = PortClaims()
    settings, overrides = with_free_ports(config, overrides, look, claims)
    require_model(settings.model.path)
    require_pythons(settings)
    placement = placement_of(settings, machine_of(settings))
    forwarded = forwarded_arguments(config, overrides)
    specs = [*process_specs(settings, forwarded, placement), *tracker_specs(settings, forwarded)]
    console = PlainConsole()
    if placement.text and look != "quiet":
        console.print(f"places: {placement.text}", soft_wrap=True)
    status = run_process(lambda stop: run_processes(settings, specs, console, stop, look=look))
    claims.close()
    # Of a rollout that was killed and not started again.
    kill_orphans()
    _report(settings.run.directory, console, look)
    return status


def with_free_ports(config: Path, overrides: Sequence[str], look: Look, claims: PortClaims) -> tuple[Settings, list[str]]:
    """Return the settings and the overrides that produce them; ports that are taken are replaced with free ones.

    Raises: ConfigurationError.
    """
    settings = load_settings(config, overrides, fetch=True)
    os.environ[FETCHED] = "1"
    keep_private(settings.run.directory)
    moved = moved_ports(settings, claims)
    if moved and look != "quiet":
        PlainConsole().print(
            f"some ports are taken, perhaps by another run; this run uses {', '.join(moved)}", soft_wrap=True
        )
    own = [*overrides, *moved]
    return (load_settings(config, own) if moved else settings), own


def is_finished(status: dict[str, Any]) -> bool:
    """Return whether the broker says that nothing is left to do."""
    return bool(status["finished"])


async def run_processes(
    settings: Settings,
    specs: Sequence[ProcessSpec],
    console: PlainConsole,
    stop: asyncio.Event,
    *,
    look: Look,
    done: Callable[[dict[str, Any]], bool] = is_finished,
) -> None:
    """Keep ``specs`` running until the broker's status is ``done``, or ``stop`` is set; then stop them in order.

    Raises: ConfigurationError, ServiceError, in a group.
    """
    directory = settings.run.directory
    clock = MonotonicClock()
    try:
        limits = LogLimits(max_bytes=settings.run.log_bytes, most_files=settings.run.log_files)
        supervisor = Supervisor(specs, directory / "logs", clock, max_restarts=settings.run.max_restarts, log_limits=limits)
    except OSError as error:
        raise ConfigurationError(
            f"run.directory is {directory}: {error.filename or 'it'} cannot be written ({error.strerror}): make room "
            "and make it writable, or choose another one"
        ) from error
    async with connection(settings, clock) as broker:
        watcher = Watcher(broker, supervisor, clock, News(settings))
        with Display(console, str(directory), look=look) as display:
            display.say(f"starting {len(supervisor.children)} processes; logs are in {directory / 'logs'}")
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(supervisor.run(), name="supervisor")
                try:
                    await watcher.watch(stop, display, done)
                finally:
                    display.say("stopping all processes")
                    await supervisor.stop()
                await keeping
    if watcher.error:
        raise ServiceError(watcher.error)


class Watcher:
    """Asks the broker for the run's status until the run is over.

    waits for:    the broker; the next second
    unblocked by: Status; ``stop``
    """

    def __init__(self, broker: Operator, supervisor: Supervisor, clock: Clock, news: News | None = None) -> None:
        self._broker = broker
        self._news = news
        self._supervisor = supervisor
        self._clock = clock
        self.error = ""

    async def watch(
        self, stop: asyncio.Event, display: Display, done: Callable[[dict[str, Any]], bool] = is_finished
    ) -> None:
        """Show the run until its status is ``done`` or ``stop`` is set."""
        begin = self._clock.now()
        seen_running = False
        while not await until_stopped(stop, REFRESH_S):
            status = await self._broker.status_if_connected(STATUS_TIMEOUT_S)
            if status is not None and (status["stopping"] or status["finished"]):
                self._supervisor.run_is_over()
            elapsed_s = self._clock.now() - begin
            if self._news is not None:
                await self._news.bring(display, status, self._supervisor.children, elapsed_s)
            display.show(status, self._supervisor.children, elapsed_s)
            if status is not None and done(status):
                self.error = status["error"]
                if not seen_running and status["finished"]:
                    display.say(
                        f"the run was already complete, after {status['batches_trained']} batches: raise run.num_batches to "
                        "continue it, or set another run.directory to start a new run"
                    )
                break
            seen_running = seen_running or status is not None
            if self._supervisor.all_ended:
                self.error = "all processes ended before the run was complete; see their logs"
                break


def _report(directory: Path, console: PlainConsole, look: Look) -> None:
    try:
        metrics = read_metrics(directory)
        if look == "quiet":
            write_plot(metrics)
            return
        console.print(summary_table(metrics))
        console.print(f"metrics: {metrics.path}", soft_wrap=True)
        console.print(f"plot:    {write_plot(metrics)}", soft_wrap=True)
        for line in learning_lines(metrics, directory):
            console.print(line, soft_wrap=True, markup=False)
    except (OSError, ValueError) as error:
        console.print(f"the report is missing or incomplete: {error}", soft_wrap=True)
