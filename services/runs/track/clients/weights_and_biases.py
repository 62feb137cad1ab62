"""Weights & Biases: a run in the project ``trackers.project``; offline ones are in RUN/trackers/wandb."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from gspo_services.runs.track.clients.tracker import TrackerRun
from gspo_services.runs.track.cursor import DIRECTORY
from gspo_services.runs.track.points import LINE, Point
from gspo_services.runs.track.samples import SAMPLES, SampleTable

START_S: Final = 60.0
_HEADER_BYTES: Final = 7
_BLOCK_BYTES: Final = 32768
_WHOLE, _LAST = 1, 4


class WandbRun:
    """One run. Its step is the number of the line in metrics.jsonl, which only grows; charts show batches."""

    def __init__(self, run: Any, directory: Path) -> None:
        self._run = run
        self._directory = directory

    def last_line(self) -> int | None:
        if self._run.offline:
            return max((last_record_in(path) for path in self._directory.rglob(f"run-{self._run.id}.wandb")), default=0)
        return int(self._run.starting_step) - 1 if self._run.resumed else 0

    def write(self, point: Point, samples: SampleTable | None) -> None:
        values: dict[str, Any] = {**point.values, "batch": point.batch}
        if samples is not None:
            values[SAMPLES] = wandb.Table(columns=list(samples.columns()), data=samples.rows())
        self._run.log(values, step=point.line, commit=True)

    def flush(self) -> None:
        """Do nothing: the client's own process survives ours, and at the next start we ask it how far it got."""

    def close(self) -> None:
        self._run.finish()


def open_wandb(run: TrackerRun) -> WandbRun:
    """Resume the run, or create it with its settings."""
    directory = Path(os.environ.get("WANDB_DIR") or run.directory / DIRECTORY)
    directory.mkdir(parents=True, exist_ok=True)
    opened = wandb.init(
        project=run.project,
        id=run.name,
        name=run.name,
        resume="allow",
        dir=str(directory),
        config={**run.settings, **{f"code.{key}": value for key, value in run.code.items()}},
        # The machine's load is not that of the run's processes, which may be elsewhere.
        settings=wandb.Settings(console="off", x_disable_stats=True, init_timeout=START_S),
    )
    opened.define_metric("batch", hidden=True)
    opened.define_metric("*", step_metric="batch")
    return WandbRun(opened, directory)


def last_record_in(path: Path) -> int:
    """The number of the last line of metrics.jsonl that an offline run's file has; 0 without any."""
    last = 0
    for content in offline_records(path):
        record = Record.FromString(content)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if name == LINE:
                last = max(last, int(float(item.value_json)))
    return last


def offline_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file, up to a half one that a killed process left.

    The file is a log of LevelDB: blocks of 32 KiB; each part has 4 bytes of checksum, 2 of length and one of its kind (1:
    whole, 2: first, 3: middle, 4: last). Seven bytes before them are the file's own.
    """
    content = path.read_bytes()
    place, parts = _HEADER_BYTES, b""
    while place + _HEADER_BYTES <= len(content):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            place += left
            continue
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        kind = content[place + 6]
        begin = place + _HEADER_BYTES
        if kind not in range(_WHOLE, _LAST + 1) or begin + length > len(content):
            return
        parts = content[begin : begin + length] if kind in (1, 2) else parts + content[begin : begin + length]
        if kind in (_WHOLE, _LAST):
            yield parts
        place = begin + length
