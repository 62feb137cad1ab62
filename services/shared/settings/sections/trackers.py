"""The section of experiment trackers."""

from typing import Literal

from pydantic import Field, model_validator

from gspo_services.shared.settings.sections.section import Section

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackersSection(Section):
    """Experiment trackers that ``gspo run`` sends the run to, each from its own process."""

    to: list[TrackerName] = Field([])
    """Any of tensorboard, wandb, mlflow, trackio; install each with pip. Empty: none. The tracker's own environment
    variables decide where the data goes; TensorBoard's files are in RUN/tensorboard."""
    project: str = Field("gspo", min_length=1, max_length=120, pattern=r"^[A-Za-z0-9_\-. ]+$")
    """The project's name there (MLflow: the experiment's)."""
    run_name: str = Field("", max_length=40)
    """The run's name there, followed by some characters that make it unique. Empty: the name of run.directory."""
    samples: int = Field(8, ge=0, le=100)
    """This many answers of each evaluation are sent as a table, from the first tasks. 0: none."""

    @model_validator(mode="after")
    def _once(self) -> "TrackersSection":
        if len(set(self.to)) < len(self.to):
            raise ValueError(f"trackers.to is {self.to}: name each tracker once")
        return self
