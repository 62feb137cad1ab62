"""The rollout's side of a weight update: fetch, load, verify."""

from gspo_services.rollout.weights.adapter_loader import AdapterPlan, lora_arguments
from gspo_services.rollout.weights.colocate import EngineDevice, taken
from gspo_services.rollout.weights.directory import weights_directory
from gspo_services.rollout.weights.peers import WeightPeers
from gspo_services.rollout.weights.probe import require_same_policy
from gspo_services.rollout.weights.sync import WeightSync

__all__ = [
    "AdapterPlan",
    "EngineDevice",
    "WeightPeers",
    "WeightSync",
    "lora_arguments",
    "require_same_policy",
    "taken",
    "weights_directory",
]
