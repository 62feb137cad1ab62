"""A digest of the settings that all processes of one run must share."""

import hashlib
import json
from pathlib import PurePath
from typing import Final

from gspo_services.shared.settings.sections import Settings
from gspo_services.shared.settings.told import told_settings

_OF_AGENTS: Final = {"function", "command", "on_deadline", "on_replay", "weights", "renderer"}

_OF_REWARDS: Final = (
    "on_deadline", "group", "group_weights", "model_weight", "model_input", "model_max_tokens", "model_too_long",
)  # fmt: skip


def run_fingerprint(settings: Settings) -> str:
    """Digest tasks, batches, seed and the model's directory name; 32 hexadecimal characters.

    It leaves out what processes may see differently (paths, ports), and what may change when a run is resumed (number of
    batches, evaluation, objective, learning rate, and sampling, which the broker records for each group and sends with its
    leases: all rollouts sample a group alike, whatever their own files say).
    """
    plain = told_settings(settings)  # settings.json has no more
    agreed = {
        "seed": plain["run"]["seed"],
        "model": PurePath(plain["model"]["path"]).name,
        # What the policy is asked, and what its answers say.
        "template_arguments": plain["model"]["template_arguments"],
        "show_special_tokens": plain["model"]["show_special_tokens"],
        "environment": plain["environment"],
        # The members of a group are compared, and different rollouts may grade them.
        "reward": {name: plain["reward"][name] for name in _OF_REWARDS} | {"model": PurePath(plain["reward"]["model"]).name},
        "batch": plain["batch"],
        # As gspo 0.1.0 has it for one broker: such runs are continued.
        "num_brokers": 1,
    }
    # Not the default, so that runs which began before it counted are continued.
    if plain["reward"]["model"] and plain["reward"]["model_dtype"] != "auto":
        agreed["reward"]["model_dtype"] = plain["reward"]["model_dtype"]
    agent = plain["agent"]
    if agent["function"] or agent["command"] or agent["url"]:
        agreed["agent"] = {key: value for key, value in agent.items() if key in _OF_AGENTS}
    canonical = json.dumps(agreed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
