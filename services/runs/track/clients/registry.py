"""Which trackers there are, and what each needs to be installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from gspo_services.runs.track.clients.tracker import Tracker, TrackerRun
from gspo_services.shared.runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Client:
    """How a tracker is reached."""

    package: str
    """What is imported, and what pip installs."""
    opener: str
    """module:function"""

    def open(self, run: TrackerRun) -> Tracker:
        """Open the tracker. Raises: whatever its client raises."""
        module, _, function = self.opener.partition(":")
        opener: Callable[[TrackerRun], Tracker] = getattr(import_module(module), function)
        return opener(run)


CLIENTS: Final = {
    "tensorboard": Client(package="tensorboard", opener="gspo_services.runs.track.clients.event_files:open_tensorboard"),
    "wandb": Client(package="wandb", opener="gspo_services.runs.track.clients.weights_and_biases:open_wandb"),
    "mlflow": Client(package="mlflow", opener="gspo_services.runs.track.clients.mlflow_server:open_mlflow"),
    "trackio": Client(package="trackio", opener="gspo_services.runs.track.clients.trackio_project:open_trackio"),
}


def find_client(name: str) -> Client:
    """The client of the tracker ``name``. Raises: ConfigurationError when there is none, or it is not installed."""
    client = CLIENTS.get(name)
    if client is None:
        raise ConfigurationError(f"no tracker is called {name!r}; known: {', '.join(CLIENTS)}")
    if importlib.util.find_spec(client.package) is None:
        raise ConfigurationError(
            f"the tracker {name} is not installed here: pip install {client.package}, or leave it out of trackers.to; "
            f"`gspo track RUN --to {name}` sends a run also afterwards"
        )
    return client
