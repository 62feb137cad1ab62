"""What each process does until it is ready, from the events at the end of its log."""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from gspo_services.cli.run.supervisor import Child
from gspo_services.shared.runtime.log_files import read_end

TAIL_BYTES: Final = 32_768
BEFORE: Final = timedelta(seconds=2)
"""A process may have written this long before it was first looked at."""


class Starts:
    """Looks at the logs of processes that are not ready yet."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """``now``: with a time zone, as logs have it."""
        self._now = now
        self._since: dict[int, datetime] = {}
        self._ready: set[int] = set()

    def doing(self, child: Child) -> str:
        """Return what a running process does while it starts; empty once it was ready, or if the run can do without it."""
        pid = child.pid
        if pid is None or pid in self._ready or not child.spec.is_essential:
            return ""
        now = self._now()
        since = self._since.setdefault(pid, now - BEFORE)
        with suppress(OSError):
            for line in reversed(read_end(child.log_path, TAIL_BYTES).splitlines()):
                found = _event(line)
                if found is not None and found[0] < since:
                    break
                if found is not None and found[1]["event"] in _DOING:
                    at, event = found
                    said = _DOING[event["event"]](event, (now - at).total_seconds())
                    if not said:
                        self._ready.add(pid)
                    return said
        return "starts"


def _event(line: str) -> tuple[datetime, dict[str, Any]] | None:
    """A line's time and content; None for what libraries print."""
    try:
        plain = json.loads(line)
        return datetime.fromisoformat(plain["timestamp"]).astimezone(UTC), {**plain, "event": str(plain["event"])}
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _server(event: dict[str, Any], age_s: float) -> str:
    waited = event.get("waited_s", 0)
    return f"starts SGLang, {age_s + (waited if isinstance(waited, int | float) else 0):.0f} s"


def _ready(event: dict[str, Any], age_s: float) -> str:
    return ""


_DOING: Final[dict[str, Callable[[dict[str, Any], float], str]]] = {
    "broker_started": _ready,
    "memory_of_a_rank_gib": lambda event, age_s: f"loads the model, {age_s:.0f} s",
    **dict.fromkeys(("published", "waiting_for_batch", "batch_trained"), _ready),
    **dict.fromkeys(("engine_server_started", "engine_server_starting"), _server),
    "engine_server_ready": lambda event, age_s: f"has SGLang and waits for weights, {age_s:.0f} s",
    "weights_loaded": _ready,
}
"""By event, what a process does after it, for so many seconds."""
