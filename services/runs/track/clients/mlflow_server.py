"""MLflow: a run in the experiment ``trackers.project``, at MLFLOW_TRACKING_URI."""

from typing import Any, Final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from gspo_services.runs.track.clients.tracker import TrackerRun
from gspo_services.runs.track.points import LINE, Point
from gspo_services.runs.track.samples import SampleTable

MOST_METRICS: Final = 1000
MOST_PARAMS: Final = 100
MOST_CHARACTERS: Final = 500
NAME_TAG: Final = "gspo.run"
"""The tag that finds the run again: MLflow chooses ids itself."""
SAMPLES_FILE: Final = "samples.json"


class MlflowRun:
    """One run of MLflow."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def last_line(self) -> int:
        metrics: dict[str, float] = self._client.get_run(self._run_id).data.metrics
        return int(metrics.get(LINE, 0))

    def write(self, point: Point, samples: SampleTable | None) -> None:
        if samples is not None:
            self._client.log_table(self._run_id, data=samples.columns(), artifact_file=SAMPLES_FILE)
        milliseconds = round(1000 * point.time)
        metrics = [Metric(name, value, milliseconds, point.batch) for name, value in point.values.items()]
        # The line's number comes last: it says that the others are there.
        metrics.sort(key=lambda metric: metric.key == LINE)
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MOST_METRICS], synchronous=True)

    def flush(self) -> None:
        """Do nothing: every call returns only when the server has the data."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def open_mlflow(run: TrackerRun) -> MlflowRun:
    """Find the run, or create it with its settings."""
    client = MlflowClient()
    experiment = client.get_experiment_by_name(run.project)
    experiment_id = client.create_experiment(run.project) if experiment is None else experiment.experiment_id
    found: list[Any] = client.search_runs([experiment_id], filter_string=f"tags.`{NAME_TAG}` = '{run.name}'", max_results=1)
    if found:
        run_id = found[0].info.run_id
        client.update_run(run_id, status="RUNNING")
        return MlflowRun(client, run_id)
    run_id = client.create_run(experiment_id, run_name=run.name, tags={NAME_TAG: run.name}).info.run_id
    params = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in run.settings.items()]
    for first in range(0, len(params), MOST_PARAMS):
        client.log_batch(run_id, params=params[first : first + MOST_PARAMS], synchronous=True)
    tags = [RunTag(f"gspo.{key}", value) for key, value in run.code.items()]
    if "commit" in run.code:
        tags.append(RunTag("mlflow.source.git.commit", run.code["commit"]))
    client.log_batch(run_id, tags=tags, synchronous=True)
    return MlflowRun(client, run_id)
