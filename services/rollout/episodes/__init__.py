"""Agents' episodes: an agent's calls to the policy become tokens of its trajectory, which any rollout can continue."""

from gspo_services.rollout.episodes.calls import EpisodeCalls
from gspo_services.rollout.episodes.registry import EpisodeRegistry
from gspo_services.rollout.episodes.roles import WrongTurns
from gspo_services.rollout.episodes.shared import EpisodeShared

__all__ = ["EpisodeCalls", "EpisodeRegistry", "EpisodeShared", "WrongTurns"]
