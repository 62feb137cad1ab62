"""The rollout's side of a weight update: fetch, load, verify."""

from services.rollout.weights.adapters import AdapterPlan, lora_arguments
from services.rollout.weights.directory import weights_directory
from services.rollout.weights.peers import WeightPeers
from services.rollout.weights.sync import WeightSync
from services.rollout.weights.turns import EngineTurns, taken

__all__ = ["AdapterPlan", "EngineTurns", "WeightPeers", "WeightSync", "lora_arguments", "taken", "weights_directory"]
