"""TensorBoard: event files in RUN/tensorboard. Its scalars are float32."""

from pathlib import Path
from typing import Any, Final

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text import metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from gspo_services.runs.track.clients.tracker import TrackerRun
from gspo_services.runs.track.points import LINE, Point
from gspo_services.runs.track.samples import SAMPLES, SampleTable

DIRECTORY: Final = "tensorboard"


class TensorBoardRun:
    """A folder of event files: each process that writes adds one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last = last_record_in(directory)
        self._writer = EventFileWriter(str(directory))

    def last_line(self) -> int:
        return self._last

    def write(self, point: Point, samples: SampleTable | None) -> None:
        if samples is not None:
            self._write_text(SAMPLES, samples.markdown(), point.batch, point.time)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        # One event, so that a killed writer leaves a whole point or nothing.
        self._writer.add_event(Event(step=point.batch, wall_time=point.time, summary=Summary(value=values)))

    def begin(self, run: TrackerRun) -> None:
        """Record settings and code version."""
        rows = [*run.code.items(), *run.settings.items()]
        text = "\n".join(["| key | value |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)])
        self._write_text("run/settings", text, 0, 0.0)
        plain = {**run.code, **run.settings}
        self._writer.add_event(Event(step=0, summary=hparams.hparams_pb(plain, trial_id=run.name)))
        self.flush()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write_text(self, tag: str, text: str, step: int, time: float) -> None:
        value = Summary.Value(
            tag=tag,
            metadata=metadata.create_summary_metadata(display_name=None, description=None),
            tensor=tensor_util.make_tensor_proto(text.encode(), dtype="string"),
        )
        self._writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=[value])))


def open_tensorboard(run: TrackerRun) -> TensorBoardRun:
    """Open a folder; a run that starts anew beside an older one gets a new folder."""
    directory = run.directory / DIRECTORY / run.name
    opened = TensorBoardRun(directory)
    if run.begins or not opened.last_line():
        opened.begin(run)
    return opened


def last_record_in(directory: Path) -> int:
    """The number of the last line of metrics.jsonl that event files have; 0 without any."""
    return max((_record_of(value) for path in directory.glob("*tfevents*") for value in _values(path)), default=0)


def _values(path: Path) -> list[Any]:
    # A file that a killed process left may end with half an event; the loader stops before it.
    return [value for event in EventFileLoader(str(path)).Load() for value in event.summary.value if value.tag == LINE]


def _record_of(value: Any) -> int:
    return int(tensor_util.make_ndarray(value.tensor).item())
