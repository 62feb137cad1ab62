"""Groups names of measures for trackers: metrics.jsonl has ``clip_fraction/lag_1``, a tracker ``clip/fraction/lag_1``.

Trackers make one panel or folder of everything with the same text before the first slash.
"""

import re
from collections.abc import Mapping
from typing import Final

MOST_CHARACTERS: Final = 200
_WHOLE: Final = frozenset({"train", "eval", "length", "lag", "pass_rate", "sampling", "clip", "level", "events"})
"""Groups that names in metrics.jsonl already have."""
_GROUPS: Final = (
    (re.compile(r"clip_(?P<rest>.*)"), "clip"),
    (re.compile(r"(?P<rest>(ratio_|mismatch|log_ratio|effective_sample|rejected_|clamped_).*)"), "ratio"),
    (re.compile(r"(?P<rest>(entropy|kl).*)"), "policy"),
    (re.compile(r"experts?_(?P<rest>.*)"), "experts"),
    (re.compile(r"(?P<rest>tokens_per_s|.*_s|.*_s/.*|mfu.*)"), "speed"),
    (re.compile(r"(?P<rest>(policy_version|assembled_at_version|time_s|line)$)"), "progress"),
    (re.compile(r"(?P<rest>(num_|packed_|sequences|tokens|groups|zero_|signal_).*)"), "data"),
)
_LEFT_OUT: Final = frozenset({"event", "line", "batch", "time", "again"})
"""What a point has apart from its measures."""
_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_\-. /]")


def tracker_name(key: str, event: str) -> str:
    """Return the name of a measure. ``event``: the kind of its row; those of an evaluation are all in ``eval/``."""
    head = key.partition("/")[0]
    if event in ("eval", "evaluation"):
        return key if head == "eval" else f"eval/{key}"
    if head in _WHOLE and "/" in key:
        return key
    if key == "time_s":
        return "progress/time_s"
    for pattern, group in _GROUPS:
        match = pattern.fullmatch(key)
        if match is not None:
            return f"{group}/{match['rest']}"
    return f"train/{key}"


def tracker_names(keys: Mapping[str, object] | list[str], event: str) -> dict[str, str]:
    """Return a name for each measure of a row, all different: users and peers choose names of reward components."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for key in keys:
        if key in _LEFT_OUT:
            continue
        name = usable(tracker_name(key, event))
        number = 2
        while name in taken:
            name = f"{name.removesuffix(f'_{number - 1}')}_{number}"
            number += 1
        taken.add(name)
        names[key] = name
    return names


def usable(name: str) -> str:
    """Return ``name`` as every tracker accepts it: MLflow is the strictest. No empty part, and no ``..``."""
    parts = [part.strip(". ") for part in _UNUSUAL.sub("_", name).split("/")]
    return "/".join(part for part in parts if part)[:MOST_CHARACTERS] or "unnamed"
