"""A run as columns, for data frames."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from gspo_services.runs.metrics import BatchMetrics, HeldOut
from gspo_services.runs.reading import RecordedGroup

Columns = dict[str, list[Any]]
Kind = Literal["batches", "evaluations", "trajectories"]

_OF_GROUP = ("group_id", "split", "task_index", "status", "batch", "policy_version", "evaluation", "drop_reason")
_OF_TRAJECTORY = (
    "trajectory_id", "reward", "lag", "num_tokens", "num_action_tokens", "num_turns", "min_version", "mean_version",
    "finish_reason", "epoch", "attempts",
)  # fmt: skip


def batch_columns(batches: Sequence[BatchMetrics]) -> Columns:
    """``batch``, ``policy_version``, and one column for each measure that a line has; None where another has none."""
    names = dict.fromkeys(name for each in batches for name in each.measures if name not in ("batch", "policy_version"))
    first: Columns = {
        "batch": [each.index for each in batches],
        "policy_version": [each.policy_version for each in batches],
    }
    return first | {name: [each.measures.get(name) for each in batches] for name in names}


def evaluation_columns(evaluations: Sequence[HeldOut]) -> Columns:
    """Return one column for each field."""
    names = ("batch", "policy_version", "reward", "num_finished", "num_failed", "time_s")
    return {name: [getattr(each, name) for each in evaluations] for name in names}


def trajectory_columns(groups: Iterable[RecordedGroup]) -> Columns:
    """Return one row for each trajectory, with its group's data; one column for each component of the rewards."""
    columns: Columns = {name: [] for name in (*_OF_TRAJECTORY, *_OF_GROUP)}
    components: Columns = {}
    rows = 0
    for group in groups:
        for member in group.members:
            for name in _OF_TRAJECTORY:
                columns[name].append(getattr(member, name))
            for name in _OF_GROUP:
                columns[name].append(getattr(group, name))
            for name in member.components.keys() - components.keys():
                components[name] = [None] * rows
            for name, values in components.items():
                values.append(member.components.get(name))
            rows += 1
    return columns | {f"reward/{name}": components[name] for name in sorted(components)}
