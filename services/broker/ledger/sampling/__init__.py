"""Which tasks are sampled next, and which groups are worth a place in a batch."""

from gspo_services.broker.ledger.sampling.curriculum import Curriculum
from gspo_services.broker.ledger.sampling.rests import MOST_PASSED_OVER, Rests
from gspo_services.broker.ledger.sampling.schedule import AddedTasks, SourceShare, TaskSchedule
from gspo_services.broker.ledger.sampling.task_order import TaskOrder, trajectory_seed
from gspo_services.broker.ledger.sampling.zero_advantage import SamplingRules, has_advantage, has_equal_rewards

__all__ = [
    "MOST_PASSED_OVER",
    "AddedTasks",
    "Curriculum",
    "Rests",
    "SamplingRules",
    "SourceShare",
    "TaskOrder",
    "TaskSchedule",
    "has_advantage",
    "has_equal_rewards",
    "trajectory_seed",
]
