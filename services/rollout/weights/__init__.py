"""The rollout's side of a weight update: fetch, load, verify."""

from gspo_services.rollout.weights.adapters import AdapterPlan, lora_arguments
from gspo_services.rollout.weights.directory import weights_directory
from gspo_services.rollout.weights.peers import WeightPeers
from gspo_services.rollout.weights.sync import WeightSync
from gspo_services.rollout.weights.turns import EngineTurns, taken

__all__ = ["AdapterPlan", "EngineTurns", "WeightPeers", "WeightSync", "lora_arguments", "taken", "weights_directory"]
