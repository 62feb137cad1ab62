"""What a batch's line of metrics says about the batch itself, from its row alone."""

from services.broker.ledger.lengths import sampling_line
from services.broker.rows import BatchRow


def batch_report(batch: BatchRow) -> dict[str, float | None]:
    """By name as in metrics.jsonl: counts begin with ``num_``; of largest values the last part is or begins with ``max``."""
    stats = batch.stats
    return {
        "num_tokens": stats.num_tokens,
        "num_action_tokens": stats.num_action_tokens,
        "num_trajectories": stats.num_trajectories,
        "num_zero_variance_groups": stats.num_zero_variance_groups,
        "num_left_out_groups": stats.num_left_out_groups,
        "num_left_out_tokens": stats.num_left_out_tokens,
        "train/reward": stats.mean_reward,
        "lag/mean": stats.mean_lag,
        "lag/max": stats.max_lag,
        **{f"train/reward/{name}": mean for name, mean in stats.components.items()},
        **({} if stats.lengths is None else stats.lengths.line("")),
        **sampling_line(batch),
        **{f"pass_rate/{name}": rate for name, rate in stats.pass_rates.items()},
    }
