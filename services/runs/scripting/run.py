"""One run, from a script or notebook. All calls block; none needs an event loop, or disturbs a notebook's."""

import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import LEDGER_FILE, lock_holder
from gspo_services.runs.metrics import (
    BatchMetrics,
    Event,
    HeldOut,
    MetricsFollower,
    RunMetrics,
    batch_metrics,
    read_metrics,
    typed,
)
from gspo_services.runs.reading import OpenRun, RecordedGroup, RecordedTokens, RecordedTrajectory, open_run
from gspo_services.runs.scripting.columns import Columns, Kind, batch_columns, evaluation_columns, trajectory_columns
from gspo_services.runs.scripting.processes import ask_to_stop, interrupt, last_lines, log_path, overrides_of, start_run
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.shared.settings import Settings, load_settings, override_settings, read_run_settings, require_model

POLL_S: Final = 0.5
QUIET_S: Final = 5.0
"""A broker that restarts is away for less time."""
END_S: Final = 660.0
"""A learner that is stopped first finishes its batch and saves."""
PAGE: Final = 1024


class RunFailed(ServiceError):
    """A run that this script started ended with an error; the text has the end of its output."""


class TrainingRun:
    """A run: one that this script started (``start``), or any other by its directory (``open``).

    As a context manager it interrupts a run that it started if that run is still active at the block's end.
    """

    def __init__(self, directory: Path, settings: Settings | None, process: subprocess.Popen[bytes] | None) -> None:
        """Use ``start`` or ``open``."""
        self.directory = directory
        self._settings = settings
        self._process = process

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Open an existing run: finished, interrupted, or active. Reading changes nothing in it.

        Raises: ConfigurationError when the directory holds no run.
        """
        path = Path(directory).absolute()  # A notebook may change its working directory.
        if not any((path / name).is_file() for name in (LEDGER_FILE, METRICS_FILE)):
            raise ConfigurationError(f"{path} holds no run: there is neither {LEDGER_FILE} nor {METRICS_FILE}")
        return cls(path, None, None)

    @classmethod
    def start(cls, config: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Self:
        """Start ``gspo run`` on this machine, or continue the run in its directory. Returns at once.

        The run outlives this script unless you stop it. Its output is in logs/gspo-run.log of its directory.

        Args:
            config: the run's TOML file.
            overrides: settings to change, such as ``{"run.seed": 1, "batch.max_lag": 0}``.

        Raises: ConfigurationError, before anything starts, when the configuration cannot be used or the run is active.
        """
        words = overrides_of(overrides)
        settings = load_settings(Path(config), words, fetch=True)
        require_model(settings.model.path)
        directory = settings.run.directory.absolute()
        if lock_holder(directory / LEDGER_FILE) is not None:
            raise ConfigurationError(f"{directory}: this run is already active: Run.open({str(directory)!r}) watches it")
        return cls(directory, settings, start_run(Path(config), words, directory))

    @property
    def settings(self) -> Settings:
        """Return every setting, with defaults. Raises: ConfigurationError when they cannot be read."""
        if self._settings is not None:
            return self._settings
        return override_settings(read_run_settings(self.directory), [f"run.directory={self.directory}"])

    @property
    def is_live(self) -> bool:
        """Whether the run is active: the process that this script started, or a broker on this machine."""
        if self._process is not None:
            return self._process.poll() is None
        return lock_holder(self.directory / LEDGER_FILE) is not None

    # --- the run while it is active -----------------------------------------------------------------------------------

    def watch(self, *, history: bool = True, timeout_s: float | None = None) -> Iterator[Event]:
        """Yield each batch, evaluation and other event until the run has ended. ``history``: existing ones first.

        Raises: TimeoutError if it has not ended after ``timeout_s``; RunFailed if a run that this script started failed;
        ConfigurationError when metrics.jsonl cannot be read.
        """
        follower = MetricsFollower(self.directory / METRICS_FILE)
        if not history:
            for _ in _events(follower):
                pass
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ended = False
        quiet_since: float | None = None
        while True:
            yield from _events(follower)
            if ended:
                break
            now = time.monotonic()
            quiet_since = None if self.is_live else quiet_since or now
            # Read once more after the end: the last lines may have come between the two looks.
            ended = quiet_since is not None and (self._process is not None or self._is_over or now - quiet_since >= QUIET_S)
            if not ended:
                if deadline is not None and now >= deadline:
                    raise TimeoutError(f"{self.directory}: the run is still active after {timeout_s:g} s")
                time.sleep(POLL_S)
        self._require_success()

    def wait(self, *, timeout_s: float | None = None) -> Self:
        """Return when the run has ended. Raises: as ``watch``."""
        for _ in self.watch(history=False, timeout_s=timeout_s):
            pass
        return self

    def stop(self, reason: str = "stopped by a script") -> None:
        """Let the run finish its batch, save a checkpoint, export and end, as ``gspo stop`` does. Returns after the request:
        use ``wait`` for the end.

        Raises: ServiceError when the broker of a run that this script did not start does not answer.
        """
        problem = ask_to_stop(self.directory, reason)
        if problem and self._process is None:
            raise ServiceError(problem)
        if problem and self._process is not None:
            interrupt(self._process)  # It has no broker yet, or no longer has one.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        interrupt(self._process)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Its children end with it.
            self._process.wait()

    @property
    def _is_over(self) -> bool:
        try:
            return len(read_metrics(self.directory).batches) >= self.settings.run.num_batches
        except ConfigurationError:
            return False

    def _require_success(self) -> None:
        status = None if self._process is None else self._process.wait()
        if status:
            raise RunFailed(
                f"{self.directory}: gspo run ended with status {status}; the end of its output:\n"
                f"{last_lines(log_path(self.directory))}"
            )

    # --- what the run has written -------------------------------------------------------------------------------------

    def metrics(self) -> list[BatchMetrics]:
        """Return the trained batches, in order; for a batch trained again, the last training. Raises: ConfigurationError."""
        return [batch_metrics(row) for row in self._read().batches]

    def evaluations(self) -> list[HeldOut]:
        """Return the finished evaluations on held-out tasks, by batches trained. Raises: ConfigurationError."""
        return self._read().evaluations

    def _read(self) -> RunMetrics:
        found = read_metrics(self.directory)
        for each in found.damage:
            warnings.warn(str(each), stacklevel=3)
        return found

    def groups(self, *, split: str | None = None, status: str | None = None) -> Iterator[RecordedGroup]:
        """Yield prompts with their sampled trajectories from the ledger, page by page. In an active run, each is in its
        state when its page is read.

        Args:
            split: "train" or "eval".
            status: of the groups: "open", "complete", "batched", "dropped", "evaluated", "filtered", "quarantined",
                "requeued" or "resampled".

        Raises: NoLedger, StoreCorrupt.
        """
        at = 0
        while True:
            # Closed while the caller works on a page: otherwise a broker cannot shorten its log.
            with open_run(self.directory) as run:
                end = run.facts().num_groups
                page = list(run.groups(first=at, end=min(at + PAGE, end), split=split, status=status))
            yield from page
            at += PAGE
            if at >= end:
                return

    def trajectories(self, *, split: str | None = None, status: str | None = None) -> Iterator[RecordedTrajectory]:
        """Yield the trajectories of ``groups``, one by one. Raises: NoLedger, StoreCorrupt."""
        for group in self.groups(split=split, status=status):
            yield from group.members

    def tokens(self, trajectory: RecordedTrajectory | int) -> RecordedTokens:
        """All tokens of a trajectory with log-probs, policy versions, turns and leases. Raises: NoLedger, StoreCorrupt."""
        number = trajectory if isinstance(trajectory, int) else trajectory.trajectory_id
        with open_run(self.directory) as run:
            return run.tokens(number)

    def ledger(self) -> AbstractContextManager[OpenRun]:
        """Open one state of the whole ledger, for versions, batches, leases and so on. Keep it open for one look only."""
        return open_run(self.directory)

    def columns(self, kind: Kind = "batches", *, split: str | None = None) -> Columns:
        """Return ``frame`` without pandas: lists of equal length by name."""
        if kind == "batches":
            return batch_columns(self.metrics())
        if kind == "evaluations":
            return evaluation_columns(self.evaluations())
        if kind == "trajectories":
            return trajectory_columns(self.groups(split=split))
        raise ValueError(f"kind is {kind!r}: use batches, evaluations or trajectories")

    def frame(self, kind: Kind = "batches", *, split: str | None = None) -> Any:
        """Return a pandas data frame: one row for each batch, evaluation or trajectory (of one ``split``).

        Raises: ImportError without pandas, which gspo does not install.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError(
                "Run.frame needs pandas: pip install pandas; or use Run.columns, which gives the same as lists"
            ) from error
        return DataFrame(self.columns(kind, split=split))


def _events(follower: MetricsFollower) -> Iterator[Event]:
    """Yield new events, typed. Warns once of the damage of each file. Raises: ConfigurationError."""
    try:
        for row in follower.rows():
            event = typed(row)
            if event is not None:
                yield event
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: cannot be read: {error.strerror}") from error
    follower.tell_damage(warnings.warn)
