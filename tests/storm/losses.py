"""Which groups a run gave up because their attempts failed, and whether only attackers lost by it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_services.tasks.environments.arithmetic import Arithmetic, ArithmeticOptions
from tests.storm.hostile import ROLLOUT


@dataclass(frozen=True)
class Loss:
    """A training group that was dropped because attempts at one of its trajectories failed."""

    group: int
    problem: str
    peers: tuple[str, ...]
    """Which rollouts' attempts failed, in order; empty if the log no longer says so."""
    reason: str
    """Why the last one failed."""


def losses(dropped: Iterable[dict[str, Any]], logged: Sequence[dict[str, Any]]) -> list[Loss]:
    """Those of one broker. ``dropped``: its rows in metrics.jsonl; ``logged``: its log lines, in order."""
    tasks = Arithmetic(ArithmeticOptions()).tasks("train")
    failures: dict[int, list[dict[str, Any]]] = {}
    by_group: dict[int, list[dict[str, Any]]] = {}
    last: list[dict[str, Any]] = []
    for line in logged:
        if line["event"] == "attempt_failed":
            last = failures.setdefault(line["trajectory_id"], [])
            last.append(line)
        elif line["event"] == "group_dropped":
            by_group[line["group_id"]] = last
    found = []
    for row in dropped:
        if row["reason"] == "failed":
            attempts = by_group.get(row["group_id"], [])
            peers = tuple(str(attempt["peer"]) for attempt in attempts)
            reason = str(attempts[-1]["reason"])[:200] if attempts else "unknown"
            # Tasks without end come in order: a prompt is the task of its number.
            found.append(Loss(row["group_id"], str(tasks.task(row["prompt"])["problem"]), peers, reason))
    return found


def honest(found: Iterable[Loss], is_hostile: Callable[[str], bool]) -> list[Loss]:
    """Those for which neither an attacking agent nor the hostile peer can be blamed."""
    return [loss for loss in found if not is_hostile(loss.problem) and ROLLOUT not in loss.peers]
