"""Groups as the page lists them: rewards, advantages, lengths, lag, and outcome."""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gspo_services.runs.reading import OpenRun, RecordedGroup, RecordedTrajectory
from gspo_services.shared.settings import Settings

MOST_GROUPS: Final = 500
"""Groups of one page; the next page begins after the last of them."""
STD_EPS: Final = 1e-6
"""As in ``gspo.advantages``."""

Learned = Mapping[int, Mapping[str, Any]]
"""The learner's numbers, by trajectory: see ``learner_numbers``."""


def groups_of_batch(run: OpenRun, index: int, settings: Settings | None, learned: Learned) -> dict[str, Any] | None:
    """Return one batch with its groups; None when it was not assembled."""
    batch = run.batch(index)
    if batch is None:
        return None
    groups = run.groups_of_batch(index)
    return {
        "batch": index,
        "policy_version": batch.policy_version,
        "trained_versions": batch.trained_versions,
        "quarantined": batch.quarantined,
        "stats": batch.stats,
        "has_learned": bool(learned),
        "groups": plain_groups(run, groups, settings, learned),
        "next": None,
    }


def chosen_groups(run: OpenRun, first: int, settings: Settings | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page of groups with these values (see ``OpenRun.groups``), by id from ``first``."""
    groups = list(islice(run.groups(first=first, **chosen), MOST_GROUPS + 1))
    following = groups[MOST_GROUPS].group_id if len(groups) > MOST_GROUPS else None
    return {"has_learned": False, "groups": plain_groups(run, groups[:MOST_GROUPS], settings, {}), "next": following}


def plain_groups(
    run: OpenRun, groups: Iterable[RecordedGroup], settings: Settings | None, learned: Learned
) -> list[dict[str, Any]]:
    """Groups for the page. Advantages are those that the settings give where the learner recorded none."""
    kept = list(groups)
    advantages = _advantages(run, kept, settings)
    return [
        {
            "group_id": group.group_id,
            "split": group.split,
            "source": source_of(run, group.split == "eval", group.evaluation),
            "task_index": group.task_index,
            "status": group.status,
            "batch": group.batch,
            "policy_version": group.policy_version,
            "evaluation": group.evaluation,
            "drop_reason": group.drop_reason,
            "replaces": group.replaces,
            "roles": roles_of(settings),
            "members": [
                plain_member(member, advantages.get(member.trajectory_id), learned.get(member.trajectory_id))
                for member in group.members
            ],
        }
        for group in kept
    ]


def roles_of(settings: Settings | None) -> list[str]:
    """Return the roles that the policy plays, whose rewards are components of the same names; none for one role."""
    return [] if settings is None else settings.agent.roles


def source_of(run: OpenRun, is_eval: bool, evaluation: int | None) -> str:
    """Return which tasks an index counts in: train, eval, or eval/NAME for those of an evaluation set."""
    if not is_eval:
        return "train"
    named = run.evaluation(-1 if evaluation is None else evaluation)
    return f"eval/{named.name}" if named is not None and named.name else "eval"


def plain_member(member: RecordedTrajectory, advantage: float | None, learned: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return one trajectory of a group, for the page."""
    plain = {
        "id": member.trajectory_id,
        "status": member.status,
        "finish": member.finish_reason,
        "reward": member.reward,
        "advantage": advantage,
        "tokens": member.num_tokens,
        "action_tokens": member.num_action_tokens,
        "turns": member.num_turns,
        "lag": member.lag,
        "min_version": member.min_version,
        "epoch": member.epoch,
        "attempts": member.attempts,
        "components": member.components,
    }
    if learned is not None:
        plain |= {"clipped": learned["clipped"], "log_s": learned["log_s"], "advantage": learned["advantage"]}
    return plain


def _advantages(run: OpenRun, groups: list[RecordedGroup], settings: Settings | None) -> dict[int, float]:
    """Advantages of whole episodes by trajectory, for groups of a batch. There are none for turns' credit, overlong
    penalties, a KL in the reward or a teacher, which only the learner knows."""
    objective = None if settings is None or settings.distillation.teacher else settings.objective
    if (
        objective is None
        or objective.advantage != "sequence"
        or objective.overlong_buffer_tokens is not None
        or objective.overlong_filter_tokens is not None
        or (objective.kl_coefficient > 0 and objective.kl_in == "reward")
    ):
        return {}

    @cache
    def std_of_batch(batch: int) -> float:
        """Of the whole batch: the page may have a part of it, and others."""
        return _std(np.concatenate([_rewards(each) for each in run.groups_of_batch(batch)]))

    found: dict[int, float] = {}
    for group in groups:
        if group.batch is None or group.split != "train":
            continue
        rewards = _rewards(group)
        centred = rewards - rewards.mean()
        size = len(rewards)
        if size < 2 or rewards.max() == rewards.min():
            centred = np.zeros(size)
        if objective.advantage_baseline == "leave_one_out" and size > 1:
            centred = centred * size / (size - 1)
        if objective.normalise_by_std:
            std = std_of_batch(group.batch) if objective.std_over == "batch" else _std(rewards)
            centred = centred / (std + STD_EPS)
        found |= {member.trajectory_id: float(value) for member, value in zip(group.members, centred, strict=True)}
    return found


def _rewards(group: RecordedGroup) -> npt.NDArray[np.float64]:
    return np.array([member.reward or 0.0 for member in group.members], np.float64)


def _std(rewards: npt.NDArray[np.float64]) -> float:
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
