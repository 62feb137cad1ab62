"""The rollout's side of a weight update: fetch, load, verify."""

from services.rollout.weights.directory import weights_directory
from services.rollout.weights.peers import WeightPeers
from services.rollout.weights.process_group import ReceivingGroup
from services.rollout.weights.sync import WeightSync

__all__ = ["ReceivingGroup", "WeightPeers", "WeightSync", "weights_directory"]
