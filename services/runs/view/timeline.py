"""Events of a run's processes for the time line: starts, kills, clean ends, lost leases."""

from collections import Counter
from collections.abc import Mapping
from os import stat_result
from pathlib import Path
from typing import Any, Final

from gspo_services.runs.reading import ProcessEvent, process_events

SHOWN_FIELDS: Final = ("peer", "trajectory_id", "num_tokens", "reason", "error", "batch", "state", "next_batch", "role")
MOST: Final = 2000
LOST_LEASES: Final = frozenset({"lease_expired", "lease_of_former_session_ended", "lease_taken_back"})


class ProcessHistory:
    """The events of a run's logs; read again only when a log has changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: object = None
        self._events: list[dict[str, Any]] = []
        self._leases: dict[int, list[dict[str, Any]]] = {}

    def events(self) -> list[dict[str, Any]]:
        """Return events of processes, oldest first: at most the newest MOST."""
        self._refresh()
        return self._events

    def of_trajectory(self, trajectory_id: int) -> list[dict[str, Any]]:
        """Return what the logs say about one trajectory's leases."""
        self._refresh()
        return self._leases.get(trajectory_id, [])

    def _refresh(self) -> None:
        seen = sorted((path.name, *_size(path.stat())) for path in self._directory.glob("logs/*.log*") if path.is_file())
        if seen == self._seen:
            return
        self._seen = seen
        found: list[dict[str, Any]] = []
        self._leases = {}
        lives: dict[str, object] = {}
        clean: set[str] = set()
        lost: Counter[tuple[str, int]] = Counter()
        for event in process_events(self._directory):
            peer = str(event.fields.get("peer", ""))[:100]
            if event.event in LOST_LEASES or event.event in ("attempt_failed", "attempt_not_counted"):
                self._of_a_lease(event)
                lost[(peer, int(event.time))] += event.event in LOST_LEASES
                continue
            if event.event == "goodbye":
                clean.add(peer)
            if event.process == "broker" and event.event == "hello":
                session = event.fields.get("session")
                # A process says Hello again after each break of its connection.
                if event.fields.get("role") == "operator" or lives.get(peer) == session:
                    continue
                name = "started" if peer not in lives else "restarted" if peer in clean else "killed"
                found.append(_plain(event, name))
                lives[peer] = session
                clean.discard(peer)
            elif event.event in ("group_dropped", "rollout_state") or peer.startswith("operator-"):
                continue  # Drops come from the ledger.
            else:
                found.append(_plain(event, event.event))
        found += [
            {"event": "leases_lost", "process": "broker", "time": float(second), "peer": peer, "number": number}
            for (peer, second), number in lost.items()
            if number
        ]
        self._events = sorted(found, key=lambda event: float(event["time"]))[-MOST:]

    def _of_a_lease(self, event: ProcessEvent) -> None:
        trajectory = event.fields.get("trajectory_id")
        if isinstance(trajectory, int):
            self._leases.setdefault(trajectory, []).append(_plain(event, event.event))


def _plain(event: ProcessEvent, name: str) -> dict[str, Any]:
    fields: Mapping[str, Any] = event.fields
    shown = {field: fields[field] for field in SHOWN_FIELDS if isinstance(fields.get(field), str | int | float)}
    short = {field: value[:300] if isinstance(value, str) else value for field, value in shown.items()}
    return {"event": name, "process": event.process, "time": event.time, **short}


def _size(stat: stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
