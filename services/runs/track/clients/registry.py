"""Lists the trackers, and what each needs to be installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from gspo_services.runs.track.clients.tracker import Tracker, TrackerRun
from gspo_services.shared.runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Client:
    """How to reach a tracker."""

    package: str
    """The module to import, and the package that pip installs."""
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
    """Return the client of the tracker ``name``. Raises: ConfigurationError if it is unknown or not installed."""
    client = CLIENTS.get(name)
    if client is None:
        raise ConfigurationError(f"there is no tracker called {name!r}; known: {', '.join(CLIENTS)}")
    if importlib.util.find_spec(client.package) is None:
        raise ConfigurationError(
            f"the tracker {name} is not installed here: pip install {client.package}, or remove it from trackers.to; "
            f"`gspo track RUN --to {name}` can also send a run afterwards"
        )
    return client
