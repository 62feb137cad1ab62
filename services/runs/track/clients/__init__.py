"""The trackers that ``gspo`` sends a run to, each through its own client, loaded only when it is used."""

from gspo_services.runs.track.clients.registry import CLIENTS, Client, find_client
from gspo_services.runs.track.clients.tracker import Tracker, TrackerRun

__all__ = ["CLIENTS", "Client", "Tracker", "TrackerRun", "find_client"]
