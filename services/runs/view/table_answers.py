"""Answers about all completions of a run, what was expected of them, and any metric of it."""

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import NoLedger, StoreCorrupt
from gspo_services.runs.expected import ExpectedAnswers
from gspo_services.runs.metrics import MetricsFollower
from gspo_services.runs.view.completions import CompletionQuery, Whole, read_query
from gspo_services.runs.view.metric_columns import MetricColumns
from gspo_services.runs.view.overview import MOST_POINTS
from gspo_services.runs.view.queries import finite, whole_number
from gspo_services.runs.view.watched_run import WatchedRun
from gspo_services.shared.settings import read_run_settings, training_settings

MOST_EXPECTED: Final = 1000
"""Tasks of one request."""
EXPECTED_CHARACTERS: Final = 2000
MOST_METRICS: Final = 16
BLOCK_ROWS: Final = 128
"""Rows of a download that are read before other looks at the run have their turn."""
SLICE_S: Final = 0.05
"""Seconds for which an index that nobody waits for keeps others from looking at the run: a slice, mostly."""
AHEAD: Final = 2_000_000
"""Trajectories of all runs together that are read before somebody asks for them; others are when they are asked for."""


class TableAnswers:
    """Answers for all runs on the page. Raises as ``PageAnswers`` does."""

    def __init__(self, runs: Mapping[str, WatchedRun]) -> None:
        self._runs = runs

    async def read_ahead(self) -> None:
        """Index the runs' completions, some at a time, so that others have their turn."""
        left = AHEAD
        for run in self._runs.values():
            try:
                total = await run.call(lambda run=run: _total(run))  # type: ignore[misc]
                if total <= left:
                    left -= total
                    await _read_all(run)
            except (NoLedger, StoreCorrupt, OSError):
                continue  # Whoever asks for its completions is told.

    async def completions(self, run: WatchedRun, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the table; see ``read_query`` for what it may ask. Raises: ValueError."""
        wanted = read_query(query)

        def look() -> dict[str, Any]:
            with run.opened() as opened:
                return run.completions.page(opened, wanted)

        return await run.call(look)

    async def blocks(self, run: WatchedRun, query: CompletionQuery) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield all rows that a query chooses, with whole texts and what was expected, in parts. Raises: ValueError."""
        await _read_all(run)
        places: Whole = await run.call(lambda: run.completions.order(query))
        trajectories = await run.call(lambda: run.completions.trajectories(places))
        for first in range(0, len(places), BLOCK_ROWS):
            block = slice(first, first + BLOCK_ROWS)

            def look(block: slice = block) -> list[dict[str, Any]]:
                with run.opened() as opened:
                    return run.completions.whole_rows(opened, places[block], trajectories[block], query.text)

            rows = await run.call(look)
            wanted = sorted({(row["source"], row["task_index"]) for row in rows})
            known = await run.call_aside(lambda wanted=wanted: _expected(run, wanted))  # type: ignore[misc]
            yield [row | {"expected": known[0].get(f"{row['source']}:{row['task_index']}")} for row in rows]

    async def components(self, run: WatchedRun) -> list[str]:
        """Return the names of the reward's components in the whole run."""
        await _read_all(run)
        return await run.call(lambda: run.completions.components)

    async def prompts(self, run: WatchedRun, trajectories: Sequence[str]) -> dict[str, Any]:
        """Return the ends of the prompts of trajectories, by id. Raises: ValueError."""
        if len(trajectories) > MOST_EXPECTED:
            raise ValueError(f"{len(trajectories)} trajectories: at most {MOST_EXPECTED} at once")
        ids = [whole_number({"id": each}, "id") or 0 for each in trajectories]

        def look() -> dict[str, Any]:
            with run.opened() as opened:
                return {"prompts": {str(each): run.completions.prompt(opened, each) for each in ids}}

        return await run.call(look)

    async def expected(self, run: WatchedRun, tasks: Sequence[str]) -> dict[str, Any]:
        """Return what tasks expect, each named as SOURCE:INDEX, and why some is missing. Raises: ValueError."""
        if len(tasks) > MOST_EXPECTED:
            raise ValueError(f"{len(tasks)} tasks: at most {MOST_EXPECTED} at once")
        wanted = sorted({_named_task(task) for task in tasks})
        found, error = await run.call_aside(lambda: _expected(run, wanted))
        return {"expected": found, "error": error}

    async def metrics(self, run: WatchedRun, names: Sequence[str], query: Mapping[str, str]) -> dict[str, Any]:
        """Return these columns of metrics.jsonl, and the names of all. Raises: ValueError."""
        if len(names) > MOST_METRICS:
            raise ValueError(f"{len(names)} metrics: at most {MOST_METRICS} at once")
        first, last = finite(query, "first"), finite(query, "last")

        def look() -> dict[str, Any]:
            columns = _columns(run)
            ends = -math.inf if first is None else first, math.inf if last is None else last
            return {"names": columns.names, "columns": [columns.plain(name, *ends, MOST_POINTS) for name in names]}

        return await run.call(look)

    async def settings(self, run: WatchedRun) -> dict[str, Any]:
        """Return all settings that are no paths or addresses, as text by name. Raises: ConfigurationError."""

        def look() -> dict[str, Any]:
            plain = read_run_settings(run.directory).model_dump(mode="json")
            found = {
                f"{section}.{key}": json.dumps(value, sort_keys=True) for section, key, value in training_settings(plain)
            }
            return {"settings": found}

        return await run.call(look)


async def _read_all(run: WatchedRun) -> None:
    def look() -> bool:
        with run.opened() as opened:
            return run.completions.read(opened, SLICE_S)

    while not await run.call(look):
        pass


def _total(run: WatchedRun) -> int:
    with run.opened() as opened:
        return opened.facts().num_trajectories


def _named_task(text: str) -> tuple[str, int]:
    name, _, index = text.rpartition(":")
    if name not in ("train", "eval") and not name.startswith("eval/"):
        raise ValueError(f"task is {text[:100]!r}: expected train:INDEX, eval:INDEX or eval/SET:INDEX")
    if not (index.isascii() and index.isdigit() and len(index) <= 15):
        raise ValueError(f"task is {text[:100]!r}: its index is no number")
    return name, int(index)


def _expected(run: WatchedRun, wanted: Sequence[tuple[str, int]]) -> tuple[dict[str, str], str]:
    try:
        if run.expected is None:
            settings = read_run_settings(run.directory)
            run.expected = ExpectedAnswers(run.directory, settings, characters=EXPECTED_CHARACTERS)
    except (ValueError, AttributeError, TypeError) as error:
        return {}, f"what was expected is not known here: {error}"
    found: dict[str, str] = {}
    errors = []
    for name in dict.fromkeys(name for name, _ in wanted):
        known, why = run.expected.of(name, [index for each, index in wanted if each == name])
        found |= {f"{name}:{index}": text for index, text in known.items()}
        errors += [why] if why else []
    return found, "\n".join(errors)


def _columns(run: WatchedRun) -> MetricColumns:
    """The columns as of now; without a ledger of this release, from metrics.jsonl, whose damaged lines are left out."""
    try:
        with run.opened() as opened:
            run.metrics.read(opened.lines())
            return run.metrics
    except (NoLedger, StoreCorrupt, OSError):
        if not (run.directory / METRICS_FILE).is_file():
            raise
        columns = MetricColumns()
        columns.take(MetricsFollower(run.directory / METRICS_FILE).rows())
        return columns
