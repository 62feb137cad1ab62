"""Checks of the reward model's files. It is not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import Situation
from gspo_services.shared.estimates import gib


def reward_model_findings(situation: Situation) -> Iterator[Finding]:
    """Whether ``reward.model`` is a classifier with one output; nothing without one."""
    reward = situation.settings.reward
    if not reward.model:
        return
    # Only now: it imports all environments, and most runs have no reward model.
    from gspo_services.tasks.reward_model import require_classifier, weight_bytes

    path = Path(reward.model).expanduser()
    if not path.exists():
        yield situation.missing("reward model", f"reward.model is {path}: there is no such directory.", "name a directory")
        return
    try:
        require_classifier(path)
    except ValueError as error:
        way_out = "name the directory of a classifier with one output in reward.model"
        yield Finding(check="reward model", status="fail", text=str(error), way_out=way_out)
        return
    text = f"{path}: one output, {gib(weight_bytes(path))} of weights, once on each machine, on {reward.model_device}"
    yield Finding(check="reward model", status="ok", text=text)
