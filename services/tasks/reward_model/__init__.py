"""A sequence-classification reward model: one process of its own on each machine, which scores conversations in batches."""

from gspo_services.tasks.reward_model.client import ModelScore, RewardModel
from gspo_services.tasks.reward_model.files import require_classifier, weight_bytes
from gspo_services.tasks.reward_model.options import RewardModelOptions

__all__ = ["ModelScore", "RewardModel", "RewardModelOptions", "require_classifier", "weight_bytes"]
