"""The learner's ranks as one process group."""

from services.learner.ranks.expert_parallel import WHOLE, ExpertShare, expert_shares, gathered
from services.learner.ranks.lost_rank import lost_ranks_named, means_lost_rank
from services.learner.ranks.process_group import init_distributed, limit_waiting

__all__ = [
    "WHOLE",
    "ExpertShare",
    "expert_shares",
    "gathered",
    "init_distributed",
    "limit_waiting",
    "lost_ranks_named",
    "means_lost_rank",
]
