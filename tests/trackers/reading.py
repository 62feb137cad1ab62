"""Reads back what a tracker has stored, without our code where the tracker has a reader, and from its files where not."""

import json
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Stored:
    """All that a tracker has of one run."""

    values: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By name and step; each list should have one value."""
    settings: dict[str, str] = field(default_factory=dict)
    samples: str = ""
    """The tables of samples, as text."""


def read_tensorboard(directory: Path, run: str) -> Stored:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    stored = Stored()
    for path in sorted((directory / "tensorboard" / run).glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                array = tensor_util.make_ndarray(value.tensor) if value.HasField("tensor") else None
                if value.tag == "samples/evaluation":
                    stored.samples += array.item().decode()
                elif value.tag == "run/settings":
                    lines = [line.strip("| ").split(" | ") for line in array.item().decode().splitlines()[2:]]
                    stored.settings = {each[0]: " | ".join(each[1:]) for each in lines}
                elif array is not None and array.dtype.kind == "f" and array.size == 1:
                    stored.values[value.tag, event.step].append(float(array.item()))
    return stored


def read_wandb(directory: Path, run: str) -> Stored:
    from wandb.proto.wandb_internal_pb2 import Record

    from gspo_services.runs.track.clients.weights_and_biases import offline_records

    stored = Stored()
    for path in sorted(directory.rglob(f"run-{run}.wandb"), key=lambda path: path.stat().st_mtime):
        for content in offline_records(path):
            record = Record.FromString(content)
            for item in [*record.run.config.update, *record.config.update]:
                stored.settings["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if name.startswith("samples/"):
                    stored.samples += json.dumps(value)
                elif "/" in name:
                    stored.values[name, int(row["batch"])].append(float(value))
    for table in directory.rglob("*.table.json"):
        stored.samples += table.read_text()
    return stored


def read_mlflow(directory: Path, run: str) -> Stored:
    from mlflow import MlflowClient

    client, stored = MlflowClient(), Stored()
    experiment = client.get_experiment_by_name("a project")
    (found,) = client.search_runs([experiment.experiment_id], filter_string=f"attributes.run_name = '{run}'")
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            stored.values[name, metric.step].append(metric.value)
    stored.settings = {**found.data.params, **{key.removeprefix("gspo."): text for key, text in found.data.tags.items()}}
    stored.samples = "".join(path.read_text() for path in directory.parent.rglob("samples.json"))
    return stored


def read_trackio(directory: Path, run: str) -> Stored:
    stored = Stored()
    (path,) = (directory.parent / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        for step, text in database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (run,)):
            for name, value in json.loads(text).items():
                if isinstance(value, dict):
                    stored.samples += json.dumps(value)
                else:
                    stored.values[name, step].append(value)
        for (text,) in database.execute("SELECT config FROM configs WHERE run_name = ?", (run,)):
            stored.settings |= json.loads(text)
    return stored


READERS: dict[str, Callable[[Path, str], Stored]] = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio,
}  # fmt: skip


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Everything stays in the test's folder, and nothing leaves this host."""
    own = {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CACHE_DIR": str(directory / "cache"),
        "WANDB_CONFIG_DIR": str(directory / "config"), "WANDB_DATA_DIR": str(directory / "data"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(directory / "trackio"), "HF_HUB_OFFLINE": "1", "HOME": str(directory),
    }  # fmt: skip
    return {**own, **more}


def command(run: Path, tracker: str, *words: str) -> list[str]:
    """`gspo track`."""
    return [sys.executable, "-m", "gspo_services.runs.track.command", str(run), "--to", tracker, *words]


def as_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content
