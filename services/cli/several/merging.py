"""Merges the statuses of the brokers that share a run into one: pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

Status = dict[str, Any]

_WORST_FIRST: Final = ("quarantined", "gone", "draining", "starting", "verifying", "serving")
"""The order in which a person wants to know a rollout's status, for when two brokers see it differently."""
_IDLE: Final = "the learner to ask"
"""How a broker's ``waiting_for`` begins when it has its share ready."""
_LEAST: Final = ("batches_trained", "batches_assembled", "batches_checkpointed", "policy_version")
NAMED_BATCHES: Final = 8
"""At most this many of the quarantined batches are described; the others are counted."""


def merged_status(answers: Sequence[Status | None]) -> Status | None:
    """Return the run's status; None when no broker answers.

    ``answers``: each broker's status in their order, None of one that does not answer. The run's has "brokers" besides: for
    each one whether it answers, and how far it is. What is not said below is what the first broker that answers says: the
    learner's state, the evaluations, the run's id.
    """
    known = {number: status for number, status in enumerate(answers) if status is not None}
    if not known:
        return None
    all_known = len(known) == len(answers)
    statuses = list(known.values())
    return {
        **statuses[0],
        **{name: min(status[name] for status in statuses) for name in _LEAST},
        "train_reward": _mean(status["train_reward"] for status in statuses),
        "lag_mean": _mean(status["lag_mean"] for status in statuses),
        "lag_max": max((status["lag_max"] for status in statuses if status["lag_max"] is not None), default=None),
        "tokens_per_s": next((each["tokens_per_s"] for each in statuses if each["tokens_per_s"] is not None), None),
        "groups": _sums(status["groups"] for status in statuses),
        "dropped": _sums(status["dropped"] for status in statuses),
        "filtered": _sums(status["filtered"] for status in statuses),
        "resting": sum(status["resting"] for status in statuses),
        # A broker counts prompts in steps of as many as there are brokers.
        "prompts_started": sum(status["prompts_started"] // len(answers) for status in statuses),
        "quarantined": _quarantined([status["quarantined"] for status in statuses]),
        "rollouts": _rollouts(statuses),
        "rollouts_gone": _rollouts_gone(statuses),
        "limited": [each for status in statuses for each in status.get("limited", ())],
        "waiting_for": _waiting_for(known, len(answers)),
        "quiet_s": max(status["quiet_s"] for status in statuses),
        "stopping": next((status["stopping"] for status in statuses if status["stopping"]), ""),
        "finished": all_known and is_over(statuses),
        "error": _named(known, "error"),
        "brokers": [_broker(number, status) for number, status in enumerate(answers)],
    }


def is_over(statuses: Sequence[Status]) -> bool:
    """Return whether nothing is left to do for any broker.

    After a stop some brokers may have one more share than the others. A finished broker gives no further share, so that
    batch waits until the run continues.
    """
    if not any(status["finished"] for status in statuses):
        return False
    trained = max(status["batches_trained"] for status in statuses)
    return all(
        status["batches_trained"] == trained
        and (status["finished"] or (bool(status["stopping"]) and status["batches_assembled"] <= trained + 1))
        for status in statuses
    )


def _broker(number: int, status: Status | None) -> Status:
    if status is None:
        return {"broker": number, "answers": False}
    names = ("batches_trained", "batches_assembled", "policy_version", "groups", "waiting_for", "learner", "finished")
    rollouts = {each["peer"]: each["status"] for each in status["rollouts"]}
    return {"broker": number, "answers": True, **{name: status[name] for name in names}, "rollouts": rollouts}


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the plain mean: each broker has as many groups of a batch as any other."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sums(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, number in each.items():
            total[name] = total.get(name, 0) + number
    return total


def _quarantined(parts: Sequence[Status]) -> Status:
    """Each broker quarantines its own share of a batch: the others are trained without it."""
    named: dict[int, Status] = {}
    for part in parts:
        for each in part["newest"]:
            former = named.get(each["batch"])
            named[each["batch"]] = each if former is None else former | {"groups": former["groups"] + each["groups"]}
    return {
        "batches": max(len(named), *(part["batches"] for part in parts)),
        "groups": sum(part["groups"] for part in parts),
        "newest": [named[batch] for batch in sorted(named)][-NAMED_BATCHES:],
    }


def _rollouts(statuses: Sequence[Status]) -> list[Status]:
    """Merge the rollouts by name. A rollout that only some brokers know has not reached the others yet."""
    found: dict[str, Status] = {}
    for status in statuses:
        for each in status["rollouts"]:
            former = found.get(each["peer"])
            found[each["peer"]] = each if former is None else _both(former, each)
    return list(found.values())


def _both(one: Status, other: Status) -> Status:
    return {
        **one,
        "status": min(one["status"], other["status"], key=_badness),
        "policy_version": min(one["policy_version"], other["policy_version"]),
        "leases": one["leases"] + other["leases"],
        "silent_s": max(one["silent_s"], other["silent_s"]),
    }


def _badness(status: str) -> int:
    return _WORST_FIRST.index(status) if status in _WORST_FIRST else -1


def _rollouts_gone(statuses: Sequence[Status]) -> list[str]:
    """List those that have left every broker, or at least one and are with no other."""
    here = {each["peer"] for status in statuses for each in status["rollouts"]}
    gone = Counter(peer for status in statuses for peer in status["rollouts_gone"])
    return [peer for peer in gone if peer not in here]


def _waiting_for(known: dict[int, Status], num_brokers: int) -> str:
    """Return the ``waiting_for`` of the broker that holds up the others, with its number; silent brokers come first."""
    silent = [f"broker {number}" for number in range(num_brokers) if number not in known]
    if silent:
        return f"{' and '.join(silent)} to answer"
    least = min(status["batches_assembled"] for status in known.values())
    waiting = {
        number: status["waiting_for"]
        for number, status in known.items()
        if status["batches_assembled"] == least and status["waiting_for"]
    }
    working = {number: text for number, text in waiting.items() if not text.startswith(_IDLE)} or waiting
    if not working:
        return ""
    number, text = next(iter(working.items()))
    more = f" (broker {', '.join(map(str, list(working)[1:]))} waits too)" if len(working) > 1 else ""
    return f"broker {number}: {text}{more}"


def _named(known: dict[int, Status], name: str) -> str:
    return next((f"broker {number}: {status[name]}" for number, status in known.items() if status[name]), "")
