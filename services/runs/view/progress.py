"""How far a run is: how long it took, how long it will take, and what an empty one waits for."""

from typing import Any

from gspo_services.runs.reading import OpenRun, RunFacts
from gspo_services.runs.view.overview import Curves

IN_PLAY = "SELECT status, count(*) FROM groups WHERE status IN ('open', 'complete') GROUP BY status"


def plain_progress(opened: OpenRun, facts: RunFacts, curves: Curves) -> dict[str, Any]:
    """Return seconds since the run began as of its newest line, that line's time, seconds that are left, and what a run
    without a trained batch waits for. None: unknown."""
    last_time, took_s = curves.newest or (None, None)
    left = None if facts.settings is None else max(0, facts.settings.run.num_batches - facts.num_trained)
    return {
        "took_s": took_s,
        "last_time": last_time,
        "left_s": None if left is None or facts.stop_reason else curves.pace.seconds_left(left),
        "waits_for": "" if facts.num_trained else waits_for(opened, facts),
    }


def waits_for(opened: OpenRun, facts: RunFacts) -> str:
    """Say what a run without a trained batch waits for."""
    if not facts.is_live:
        return f"No broker runs, and no batch was trained. `gspo doctor {opened.directory}` says what is wrong."
    if not facts.policy_version:
        return "It waits for the learner, which has not published the model yet: it may still load it."
    if not facts.num_trajectories:
        return "It waits for a rollout: none has asked for a task yet. Its engine may still load the model."
    if not facts.num_batches:
        groups: dict[str, int] = dict(opened.select(IN_PLAY))
        wanted = "" if facts.settings is None else f" of the {facts.settings.batch.groups_per_batch} of its first batch"
        return f"It generates: {groups.get('complete', 0)}{wanted} groups are complete, {groups.get('open', 0)} under way."
    return "The learner trains the first batch."
