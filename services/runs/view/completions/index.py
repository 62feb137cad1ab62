"""An index over all completions of a run: numbers to sort and filter by, in memory. The ledger itself is only read."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from gspo_services.broker.rows import GroupStatus
from gspo_services.broker.store import StoreCorrupt
from gspo_services.runs.reading import OpenRun
from gspo_services.shared.token_dump import clipped_shares, recorded_batches

Whole = NDArray[np.int64]
Row = tuple[Any, ...]
SLICE: Final = 16384
"""Rows that are read between two looks at the clock: some hundredths of a second."""
STATUSES: Final = get_args(GroupStatus)
CODES: Final = {status: code for code, status in enumerate(STATUSES)}
IN_PLAY: Final = tuple(CODES[status] for status in ("open", "complete", "requeued"))
"""Groups whose rows still change."""
MOST_COMPONENTS: Final = 16
"""Components of the reward that can be sorted by; a run has a few."""
COLUMNS: Final[dict[str, type[np.generic]]] = {
    "trajectory": np.int64, "group": np.int64, "task": np.int64, "batch": np.int32, "evaluation": np.int32,
    "is_eval": np.bool_, "status": np.int8, "is_finished": np.bool_, "is_cut": np.bool_, "tokens": np.int32,
    "length": np.int32, "turns": np.int32,
    "reward": np.float64, "lag": np.float32, "version": np.float32, "clipped": np.float32,
}  # fmt: skip
"""60 bytes a trajectory. status: an index into STATUSES. length: the policy's own tokens. version: their mean. clipped: the
share of them, where the learner recorded it. batch and evaluation: -1 without one. Unknown numbers are NaN."""
ROWS: Final = """
SELECT t.trajectory_id, t.group_id, t.num_tokens, t.num_action_tokens, t.version_sum, t.num_turns, t.status = 'finished',
    coalesce(t.finish_reason = 'length', 0), g.task_index, coalesce(g.batch, -1), coalesce(g.evaluation, -1),
    g.split = 'eval', g.status, t.turn_rewards, t.components
FROM trajectories t JOIN groups g USING (group_id) WHERE t.trajectory_id
"""
IN_SLICE: Final = "BETWEEN ? AND ? ORDER BY t.trajectory_id"
IN_LIST: Final = "IN (SELECT value FROM json_each(?)) ORDER BY t.trajectory_id"
NUMBERS: Final = (
    "trajectory", "group", "tokens", "length", "version_sum", "turns", "is_finished", "is_cut", "task", "batch",
    "evaluation", "is_eval",
)  # fmt: skip
"""The columns of ROWS that are whole numbers; the group's status, the rewards of turns and the components follow."""
NEXT: Final = "SELECT trajectory_id FROM trajectories WHERE trajectory_id >= ? ORDER BY trajectory_id LIMIT ?"
LAST: Final = "SELECT coalesce(max(trajectory_id), -1) FROM trajectories"
COUNT: Final = "SELECT count(*) FROM trajectories"
SHELVED: Final = "SELECT group_id FROM groups WHERE status = 'quarantined'"
"""A group of a batch may come to that at any time."""
OF_GROUPS: Final = "SELECT trajectory_id FROM trajectories WHERE group_id IN (SELECT value FROM json_each(?))"


class CompletionIndex:
    """The columns of all trajectories that were read so far. ``read`` goes on where it stopped, and follows a live run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin_again("")

    def _begin_again(self, run_id: str) -> None:
        self._run_id = run_id
        self.number = 0
        """Trajectories that were read."""
        self.total = 0
        """Trajectories that there are, as of the last ``read``."""
        self.damaged = 0
        """Rows that are left out because they cannot be read."""
        self.revision = getattr(self, "revision", 0) + 1
        """Raised with every change."""
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(0, kind) for name, kind in COLUMNS.items()}
        self._components: dict[str, NDArray[np.float32]] = {}
        self._next = 0
        """The trajectory to go on from."""
        self._in_play: dict[int, Row] = {}
        """The trajectories whose rows still change, and these rows."""
        self._shelved: frozenset[int] = frozenset()
        self._versions: dict[int, int] = {}
        """The version that each batch was assembled for."""
        self._recorded: set[int] = set()
        """Batches whose clipped shares were read."""

    # --- what is known ------------------------------------------------------------------------------------------------

    def column(self, name: str) -> NDArray[Any]:
        """One of COLUMNS, or a component of the reward, over ``number`` trajectories. Raises: KeyError."""
        found = self._columns[name] if name in self._columns else self._components[name.removeprefix("component/")]
        return found[: self.number]

    @property
    def components(self) -> list[str]:
        """Names of the reward's components."""
        return sorted(self._components)

    @property
    def is_complete(self) -> bool:
        """Whether it has all that the run had at the last ``read``."""
        return self.number + self.damaged >= self.total

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, run: OpenRun, goes_on: Callable[[], bool]) -> None:
        """Read what is new or has changed, slice by slice for as long as ``goes_on``. Raises: StoreCorrupt."""
        run_id = str(run.select("SELECT value FROM meta WHERE key = 'run_id'"))
        if run_id != self._run_id or _number(run, LAST) < self._next - 1:
            # Another run has the directory now, or this one stands as it did before.
            self._begin_again(run_id)
        self.total = _number(run, COUNT)
        self._versions = dict(run.select("SELECT batch, policy_version FROM batches"))
        self._read_changes(run)
        while goes_on() and self._read_slice(run):
            pass
        if self.is_complete:
            self._read_clipped(goes_on)

    def _read_slice(self, run: OpenRun) -> bool:
        """Read the next trajectories; False: there are none."""
        ids = [found[0] for found in run.select(NEXT, (self._next, SLICE))]
        if not ids:
            return False
        rows = _usable(run.select(ROWS + IN_SLICE, (ids[0], ids[-1])))
        self.damaged += len(ids) - len(rows)
        self._next = ids[-1] + 1
        if rows:
            places = np.arange(self.number, self.number + len(rows))
            self.number += len(rows)
            self._make_room()
            self._fill(places, rows)
        return True

    def _read_changes(self, run: OpenRun) -> None:
        """Read again what may have changed."""
        shelved = frozenset(found[0] for found in run.select(SHELVED))
        changed = list(self._in_play)
        if shelved != self._shelved:
            changed += [each for (each,) in run.select(OF_GROUPS, (json.dumps(sorted(shelved ^ self._shelved)),))]
            self._shelved = shelved
        for first in range(0, len(changed), SLICE):
            rows = _usable(run.select(ROWS + IN_LIST, (json.dumps(changed[first : first + SLICE]),)))
            rows = [row for row in rows if self._in_play.get(row[0]) != row]
            places = self._places([row[0] for row in rows])
            known = [row for row in rows if row[0] in places]
            if known:
                self._fill(np.array([places[row[0]] for row in known]), known)

    def _places(self, trajectories: Iterable[int]) -> dict[int, int]:
        """Where known trajectories are."""
        ids = self.column("trajectory")
        found = np.flatnonzero(np.isin(ids, np.fromiter(trajectories, np.int64)))
        return dict(zip(ids[found].tolist(), found.tolist(), strict=True))

    def _make_room(self) -> None:
        size = len(self._columns["trajectory"])
        if self.number <= size:
            return
        wanted = max(self.number, min(self.total, self.number * 2), size + size // 4)
        for name, column in self._columns.items():
            self._columns[name] = _longer(column, wanted, np.nan if name == "clipped" else 0)
        for name, component in self._components.items():
            self._components[name] = _longer(component, wanted, np.nan)

    def _fill(self, places: Whole, rows: Sequence[Row]) -> None:
        *values, statuses, rewards, components = zip(*rows, strict=True)
        numbers = dict(zip(NUMBERS, np.array(values, np.int64), strict=True))
        version_sum = numbers.pop("version_sum")
        for name, column in numbers.items():
            self._columns[name][places] = column
        codes = np.array(list(map(CODES.__getitem__, statuses)))
        totals = np.array(list(map(_total, rewards)))
        lengths = numbers["length"]
        batches, inverse = np.unique(numbers["batch"], return_inverse=True)
        assembled = np.array([self._versions.get(batch, np.nan) for batch in batches.tolist()])[inverse]
        mean = np.where(lengths > 0, version_sum / np.maximum(lengths, 1), np.nan)
        self._columns["status"][places] = codes
        self._columns["reward"][places] = np.where(numbers["is_finished"], totals, np.nan)
        self._columns["version"][places], self._columns["lag"][places] = mean, assembled - mean
        is_in_play = np.isin(codes, IN_PLAY)
        for trajectory in self._in_play.keys() & set(numbers["trajectory"][~is_in_play].tolist()):
            del self._in_play[trajectory]
        self._in_play |= {rows[at][0]: rows[at] for at in np.flatnonzero(is_in_play).tolist()}
        for place, text in zip(places.tolist(), components, strict=True) if set(components) != {"{}"} else ():
            self._fill_components(place, _components(text))
        self.revision += 1

    def _fill_components(self, place: int, components: Iterable[tuple[str, float]]) -> None:
        for name, value in components:
            if name not in self._components and len(self._components) < MOST_COMPONENTS:
                self._components[name] = np.full(len(self._columns["trajectory"]), np.nan, np.float32)
            if name in self._components:
                self._components[name][place] = value

    def _read_clipped(self, goes_on: Callable[[], bool]) -> None:
        for batch in sorted(recorded_batches(self._directory) - self._recorded):
            if not goes_on():
                return
            with suppress(ValueError, OSError):  # The batch's own page says what is damaged.
                shares = clipped_shares(self._directory, batch)
                for trajectory, place in self._places(shares).items():
                    self._columns["clipped"][place] = shares[trajectory]
                self.revision += 1
            self._recorded.add(batch)


def _usable(rows: list[Row]) -> list[Row]:
    """The rows without those that were changed on the disk."""
    columns = list(zip(*rows, strict=True))
    kinds = {kind for column in columns[: len(NUMBERS)] for kind in set(map(type, column))}
    if not rows or (kinds == {int} and set(columns[len(NUMBERS)]) <= CODES.keys()):
        return rows
    return [row for each in rows for row in _usable([each])] if len(rows) > 1 else []


def _number(run: OpenRun, query: str) -> int:
    ((found,),) = run.select(query)
    if type(found) is not int:
        raise StoreCorrupt(f"{run.directory}: {found!r:.100} where a number of trajectories should be: see `gspo audit`")
    return found


def _longer(column: NDArray[Any], size: int, rest: float) -> NDArray[Any]:
    found = np.full(size, rest, column.dtype)
    found[: len(column)] = column
    return found


@lru_cache(maxsize=8192)
def _total(text: object) -> float:
    """The sum of the rewards of turns; NaN for what is none."""
    try:
        return float(sum(json.loads(text))) if isinstance(text, str) else np.nan
    except (ValueError, TypeError, RecursionError):
        return np.nan


@lru_cache(maxsize=8192)
def _components(text: object) -> tuple[tuple[str, float], ...]:
    return tuple(_named(text))


def _named(text: object) -> Iterator[tuple[str, float]]:
    try:
        found = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return
    for name, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, int | float):
            yield str(name)[:100], float(value)
